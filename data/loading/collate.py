"""Stack samples into a batch, keeping the types that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import default_collate


class Ragged(NamedTuple):
    """Images of different sizes, which a step for whole batches is to bring to one."""

    images: list[Tensor]


def is_namedtuple(value: object) -> bool:
    """Tell a namedtuple from a plain tuple: it is rebuilt from its fields, not from a list."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def rebuild(like: Any, items: list[Any]) -> Any:
    """Return a tuple, list or namedtuple of the type of `like` with new items."""
    if is_namedtuple(like):
        return type(like)(*items)
    return tuple(items) if isinstance(like, tuple) else items


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf of nested dicts, lists, tuples and namedtuples."""
    if isinstance(batch, Mapping):
        return {name: map_leaves(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return rebuild(batch, [map_leaves(function, value) for value in batch])
    return function(batch)


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new first dimension.

    As torch's `default_collate`, but a tuple stays a tuple (there it becomes a list), and a field
    that is None in every sample stays None.
    """
    first = samples[0]
    if first is None and all(sample is None for sample in samples):
        return None
    if isinstance(first, Mapping):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, list | tuple):
        return rebuild(first, [collate(column) for column in zip(*samples, strict=True)])
    return default_collate(list(samples))


def collate_ragged(samples: Sequence[Any]) -> Any:
    """Collate, but leave inputs (the samples' first part) of different sizes as they are."""
    first = samples[0]
    inputs = [sample[0] for sample in samples] if isinstance(first, tuple) else list(samples)
    if len({image.shape for image in inputs if isinstance(image, Tensor)}) < 2:
        return collate(samples)
    if not isinstance(first, tuple):
        return Ragged(inputs)
    return rebuild(first, [Ragged(inputs), *collate([sample[1:] for sample in samples])])
