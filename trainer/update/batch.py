"""Where updates come from: our loaders or any iterable of batches, read until a signal comes."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from regimen.data.batch import MicroBatch, Piece, map_tensors
from regimen.trainer.state import TrainState
from regimen.trainer.task import first_tensor

T = TypeVar("T")


class PlainBatches:
    """Read any iterable of batches, one for each update, split along the first dimension.

    For a plain DataLoader on one device. A resume within an epoch reads and drops the batches
    before; it is exact if the iterable repeats its order.
    """

    def __init__(self, loader: Any, gradient_accumulation_steps: int = 1) -> None:
        self._loader = loader
        self._steps = gradient_accumulation_steps

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the updates `start` to `stop` of an epoch."""
        drawn = itertools.islice(_walked(self._loader), start, stop)
        for update, batch in enumerate(drawn, start):
            tensor = first_tensor(batch)
            total = 1 if tensor is None or not tensor.ndim else tensor.shape[0]
            steps = max(1, min(self._steps, total))
            if steps == 1:
                yield MicroBatch(batch, Piece((), total, 0, total, 0, 1, epoch, update))
                continue
            bounds = [total * m // steps for m in range(steps + 1)]
            for m, (low, high) in enumerate(itertools.pairwise(bounds)):
                part = map_tensors(lambda t, low=low, high=high: t[low:high], batch)  # type: ignore[misc]
                yield MicroBatch(part, Piece((), high - low, low, total, m, steps, epoch, update))

    def close(self) -> None:
        """Do nothing: the iterable belongs to the caller."""


def _walked(loader: Any) -> Iterator[Any]:
    """Iterate over a loader's batches.

    Of a DataLoader without workers, as its own iterator does, but without the profiler's label
    around each batch, which takes a tenth of a small update.
    """
    own: Iterator[Any] = iter(loader)  # a DataLoader's draws a seed: random numbers stay the same
    plain = type(loader) is DataLoader and not (loader.num_workers or loader.pin_memory)
    if not plain or isinstance(loader.dataset, IterableDataset):
        return own
    dataset, collate = loader.dataset, loader.collate_fn
    if loader.batch_sampler is None:
        return (collate(dataset[index]) for index in loader.sampler)
    several = getattr(dataset, "__getitems__", None) or (lambda rows: [dataset[i] for i in rows])
    return (collate(several(indices)) for indices in loader.batch_sampler)


def as_source(loader: Any, name: str, gradient_accumulation_steps: int = 1) -> Any:
    """Return `loader` itself if it knows epochs and updates, as ours do, else wrap it.

    Raises TypeError, with the argument's `name`, where it can be read only once or not at all.
    """
    if hasattr(loader, "epoch"):
        return loader
    if isinstance(loader, Iterator):
        raise TypeError(
            f"{name} is an iterator ({type(loader).__name__}), which is read only once: give what "
            "it is made from, such as a DataLoader, a list of batches, or an object whose "
            "__iter__ starts again"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name} is not an iterable of batches: {type(loader).__name__}")
    return PlainBatches(loader, gradient_accumulation_steps)


class Waiting:
    """Read streams until a signal asks for a stop.

    The signal's handler raises nothing, as it may interrupt code that loads data. Sources call
    `is_over` between two samples and while they wait for a worker. Only a process that is `alone`
    stops at once: several processes agree at a boundary.
    """

    def __init__(self, state: TrainState, alone: bool) -> None:
        self._state, self._alone = state, alone
        self._active = False

    def is_over(self) -> bool:
        """Return whether a signal ends the current wait; False outside of one."""
        return self._active and self._alone and self._state.signal is not None

    def attend(self, source: Any) -> Any:
        """Connect a source to `is_over`, if it supports that; return it."""
        if hasattr(source, "heed"):
            source.heed(self.is_over)
        return source

    def next(self, stream: Iterator[T]) -> T | None:
        """Return the stream's next item; None at its end, or when a signal ends the wait."""
        self._active = True
        try:
            item = None if self.is_over() else next(stream, None)
            if not self.is_over():
                return item
            self._state.settle()  # a batch that arrived meanwhile is loaded again after the resume
            return None
        finally:
            self._active = False
