"""Micro-batches: their position in an update, their tensors, their device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regimen.trainer.device import copy_async, storage_dtype

IGNORED = -100  # the label of what is not learnt: torch's losses leave it out
NO_TOKEN = -100  # fills up the tokens of an answer, of the model's or of the data
# The largest tensor of integers whose minimum is computed on the host before it is copied to a
# device: 64k take 15 us, but 16M take 6 ms, which is slower than a kernel.
_MAX_HOST_MIN = 2**16


@dataclass(slots=True)  # frozen, an update of a small network would take 1 us more
class BatchSlice:
    """One micro-batch of one rank: a slice of an update's samples.

    A slice without samples has the update's first sample and `count` 0, so that its rank takes
    part in every collective with weight zero.
    """

    indices: tuple[int, ...]  # never empty, if samples are numbered
    count: int  # samples that count here
    start: int  # position of the first one in the global batch
    total: int  # samples of the global batch: all ranks and micro-batches
    micro_batch: int
    micro_batches: int
    epoch: int
    update: int
    # How often the epoch's order draws each sample before this one; empty: no sample is repeated.
    occurrences: tuple[int, ...] = ()

    def draws(self) -> list[tuple[int, int]]:
        """Return (index, occurrence) of each sample."""
        occurrences = self.occurrences or (0,) * len(self.indices)
        return list(zip(self.indices, occurrences, strict=True))


@dataclass(slots=True)
class MicroBatch:
    """A collated batch of one rank and its place in its update."""

    batch: Any
    batch_slice: BatchSlice


def rebuild(like: Any, items: list[Any]) -> Any:
    """Return a tuple, list, set or namedtuple of the type of `like` with new items."""
    if hasattr(like, "_fields"):
        return type(like)(*items)
    if isinstance(like, set):
        return set(items)
    return tuple(items) if isinstance(like, tuple) else items


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf of nested dicts, lists, tuples, sets and namedtuples."""
    if isinstance(batch, Mapping):
        return {name: map_leaves(function, value) for name, value in batch.items()}
    if isinstance(batch, list | tuple | set):
        return rebuild(batch, [map_leaves(function, value) for value in batch])
    return function(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of nested containers; the containers are new ones."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def to_device(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    non_blocking: bool = True,
) -> Any:
    """Move the tensors of a nested batch; those on the device already are not copied.

    Floating and complex tensors are converted to `dtype`, images (N, C, H, W) to channels last.
    The minimum of small int64 tensors (class labels) is computed before they leave host memory,
    for `cached_min`.
    """
    if device.type == "cpu" and dtype is None and not channels_last:
        return batch  # loaders return tensors in host memory

    def convert(tensor: Tensor) -> Tensor:
        wanted_dtype = tensor.dtype if dtype is None else dtype_for(tensor, dtype)
        leaves_host = tensor.device.type == "cpu" and device.type != "cpu"
        minimum = None
        if leaves_host and tensor.numel() <= _MAX_HOST_MIN:
            minimum = cached_min(tensor)
        tensor = tensor.to(device, storage_dtype(wanted_dtype, device), non_blocking=non_blocking)
        if minimum is not None:
            set_cached_min(tensor, minimum)
        if channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return map_tensors(convert, batch)


def index_batch(samples: Any, indices: Sequence[int], device: torch.device) -> Any:
    """Return rows of a nested batch on a device as a batch there, without waiting for it."""
    rows = copy_async(torch.from_numpy(np.array(indices)), device)

    def select(tensor: Tensor) -> Tensor:
        selected = tensor.index_select(0, rows)
        if device.type != "cpu":
            minimum = cached_min(tensor)
            if minimum is not None:
                set_cached_min(selected, minimum)  # a lower bound is enough for who asks
        return selected

    return map_tensors(select, samples)


def cached_min(tensor: Tensor) -> int | None:
    """Return the minimum of an int64 tensor, or a lower bound, if the host knows it; else None.

    A tensor in host memory is searched. For one on a device the value is the one that
    `set_cached_min` stored, so nothing waits for the device.
    """
    if tensor.dtype != torch.int64 or not tensor.numel():
        return None
    if tensor.device.type == "cpu":
        return int(tensor.min())
    minimum, version = getattr(tensor, "_least", (None, None))
    return minimum if version == _version(tensor) else None


def set_cached_min(tensor: Tensor, least: int) -> None:
    """Store the minimum of a device's integers; it is forgotten when they are changed in place."""
    tensor._least = least, _version(tensor)  # type: ignore[attr-defined]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def inputs_of(batch: Any) -> Any:
    """Return the model's input: the first part of a batch, or all of it."""
    return batch[0] if isinstance(batch, list | tuple) else batch


def dtype_for(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a run of `dtype`; complex128 in a run of float64."""
    if tensor.is_complex():
        return torch.complex128 if dtype == torch.float64 else tensor.dtype
    return dtype if tensor.is_floating_point() else tensor.dtype


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return batches of the same structure as one, tensors joined along their first dimension.

    Other leaves become a list of the batches' values.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {name: concat_batches([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list | tuple):
        return rebuild(first, [concat_batches(parts) for parts in zip(*batches, strict=True)])
    return list(batches)
