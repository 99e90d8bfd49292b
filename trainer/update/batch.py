"""Batches of any nesting: moved to a device, cut into micro-batches, counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DistributedSampler

from trainer.nested import first_tensor, map_tensors


class Piece(Protocol):
    """A micro-batch's place in its update; `data.updates.Piece` is the real one."""

    @property
    def indices(self) -> tuple[int, ...]: ...
    @property
    def count(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def update(self) -> int: ...


class MicroBatch(Protocol):
    """A batch as collated, and its place."""

    batch: Any

    @property
    def piece(self) -> Piece: ...


class BatchSource(Protocol):
    """What the trainer draws from; `data.loading.loader.Loader` is the exact one."""

    def __len__(self) -> int: ...
    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the updates `start` to `stop` of an epoch."""

    def close(self) -> None:
        """Release worker processes."""


def updates(stream: Iterable[MicroBatch]) -> Iterator[list[MicroBatch]]:
    """Group a stream of micro-batches into updates."""
    group: list[MicroBatch] = []
    for micro_batch in stream:
        group.append(micro_batch)
        if len(group) == micro_batch.piece.micro_batches:
            yield group
            group = []


@dataclass(frozen=True, slots=True)
class _Piece:
    indices: tuple[int, ...]
    count: int
    start: int
    total: int
    micro_batch: int
    micro_batches: int
    epoch: int
    update: int


@dataclass(slots=True)
class _MicroBatch:
    batch: Any
    piece: Piece


class PlainBatches:
    """Draw from any iterable of batches, one an update, cut along their first dimension.

    For those who bring their own DataLoader and one device. Resuming in the middle of an epoch
    passes over the batches before; their order is as repeatable as the iterable is.
    """

    def __init__(self, loader: Any, gradient_accumulation_steps: int = 1) -> None:
        self._loader = loader
        self._steps = gradient_accumulation_steps

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the updates `start` to `stop` of an epoch."""
        sampler = getattr(self._loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        for update, batch in enumerate(itertools.islice(self._loader, stop)):
            if update >= start:
                yield from self._cut(batch, epoch, update)

    def _cut(self, batch: Any, epoch: int, update: int) -> Iterator[MicroBatch]:
        tensor = first_tensor(batch)
        total = 1 if tensor is None or not tensor.ndim else len(tensor)
        if self._steps == 1:
            yield _MicroBatch(batch, _Piece((), total, 0, total, 0, 1, epoch, update))
            return
        steps = min(self._steps, total)
        bounds = [total * m // steps for m in range(steps + 1)]
        for m, (low, high) in enumerate(itertools.pairwise(bounds)):
            part = map_tensors(lambda t, low=low, high=high: t[low:high], batch)  # type: ignore[misc]
            yield _MicroBatch(part, _Piece((), high - low, low, total, m, steps, epoch, update))

    def close(self) -> None:
        """Leave the iterable to its owner."""


def as_source(loader: Any, gradient_accumulation_steps: int) -> BatchSource:
    """Return `loader` itself if it knows epochs and updates, else wrap it."""
    if hasattr(loader, "epoch"):
        source: BatchSource = loader
        return source
    return PlainBatches(loader, gradient_accumulation_steps)


def repeatable(loader: Any, name: str) -> Any:
    """Return `loader`. Raises TypeError if it is no iterable, or can be read only once."""
    if hasattr(loader, "epoch"):
        return loader
    if isinstance(loader, Iterator):
        raise TypeError(
            f"{name} is an iterator ({type(loader).__name__}), which is read only once: give what "
            "it is made from, such as a DataLoader, a list of batches, or an object whose "
            "__iter__ starts again"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name} is no iterable of batches but a {type(loader).__name__}")
    return loader
