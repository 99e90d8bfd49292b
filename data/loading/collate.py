"""Stack samples into a batch, keeping the types that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import default_collate

from data.batch import rebuild


class Ragged(NamedTuple):
    """Images of different sizes, which a batched step will crop or resize to one size."""

    images: list[Tensor]

    def sizes(self, most: int = 3) -> str:
        """List some of the sizes."""
        sizes = sorted({tuple(image.shape[-2:]) for image in self.images})
        listed = [f"{height} x {width}" for height, width in sizes[:most]]
        return ", ".join([*listed, "..."] if len(sizes) > most else listed)


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new first dimension.

    Like torch's `default_collate`, except that tuples stay tuples, and a field that is None in
    every sample stays None.
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
