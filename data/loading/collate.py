"""Stack samples into a batch, keeping the types that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from data.batch import rebuild


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
