"""Batches on their device, prefetched by one and transformed there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from data.batch import MicroBatch, map_tensors, to_device
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader


class OnDevice:
    """Yield a loader's micro-batches on `device`, after the device transforms.

    On a CUDA device with `prefetch`, a batch is copied (or gathered) and transformed on a side
    stream during the computation of the one before it; otherwise when it is needed. All else is the
    loader's.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        *,
        transforms: DeviceTransforms | None = None,
        non_blocking: bool = True,
        prefetch: bool = True,
    ) -> None:
        self.loader = loader
        self.device = device
        self.transforms = transforms
        self.non_blocking = non_blocking
        self.prefetch = prefetch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of updates `start` to `stop` of an epoch."""
        source = self.loader.epoch(epoch, start, stop)
        if self.prefetch and self.device.type == "cuda":
            return one_ahead(source, side_stream(self.device), self._moved)
        return map(self._moved, source)

    def _moved(self, micro: MicroBatch) -> MicroBatch:
        kept = self.loader.kept
        if kept is not None and kept.ready:
            batch = kept.batch(micro.piece.indices)
        else:
            batch = to_device(micro.batch, self.device, non_blocking=self.non_blocking)
        if self.transforms:
            batch = self.transforms(batch, micro.piece)
        return MicroBatch(batch, micro.piece)


class SideStream:
    """A CUDA stream for copies and transforms in parallel with the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, move: Callable[[MicroBatch], MicroBatch], micro: MicroBatch) -> Any:
        """Start moving; the ticket keeps the pinned source alive."""
        with torch.cuda.stream(self.stream):
            return move(micro), micro, self.stream.record_event()

    def collect(self, ticket: Any) -> MicroBatch:
        """Let the current stream wait for the copy, and record its use of the tensors."""
        moved: MicroBatch
        moved, _, done = ticket
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)

        def lent(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        map_tensors(lent, moved.batch)
        return moved


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """Return the side stream of a device, one for all loaders and epochs.

    torch caches memory for each stream: with a new stream, that of the old would stay allocated.
    """
    return SideStream(device)


def one_ahead(
    source: Iterator[MicroBatch], stream: Any, move: Callable[[MicroBatch], MicroBatch]
) -> Iterator[MicroBatch]:
    """Launch each micro-batch before the previous one is yielded.

    An error of the source is raised only after the launched one was yielded, as without
    prefetching.
    """
    waiting: Any = None
    failure: Exception | None = None
    while True:
        try:
            micro = next(source, None)
            launched = None if micro is None else stream.launch(move, micro)
        except Exception as error:
            launched, failure = None, error
        if waiting is not None:
            yield stream.collect(waiting)
        if failure is not None:
            raise failure
        if launched is None:
            return
        waiting = launched
