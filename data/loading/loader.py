"""The micro-batches of a data set on their device, from any position in an epoch."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from data.batch import MicroBatch, Piece, map_leaves, map_tensors, to_device
from data.errors import DataError
from data.loading.cache import Kept
from data.loading.device_transforms import DeviceTransforms
from data.loading.fetch import BrokenOff, Collate, Fetched, Fetcher, Skipped, collate, never
from data.loading.workers import Workers
from data.samplers import own_samples
from data.streams import Stream, as_dataset
from data.updates import UpdateSampler

logger = logging.getLogger(__name__)


class Loader:
    """Load the micro-batches of one rank onto `device`, and apply `transforms` there.

    The arguments down to `multiprocessing_context` are torch's DataLoader's (`timeout` in seconds,
    0 = without end). Those about workers are ignored without workers. `in_order=False` and
    `generator` are not offered: the order is a pure function of the sampler's.

    on_error: "raise" a DataError; "replace" a broken sample by one that (seed, index) determine; or
    "drop" it, for evaluation. More than `max_skipped` different ones are a DataError in any case.
    kept: the data set on the device. Once it is there, micro-batches are gathered from it, and no
    workers are started.
    prefetch: on a CUDA device, a batch is copied (or gathered) and transformed on a side stream
    during the computation of the one before it; otherwise when it is needed.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: UpdateSampler,
        *,
        seed: int,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        timeout: float = 0.0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | None = None,
        on_error: Literal["raise", "replace", "drop"] = "raise",
        max_skipped: int = 0,
        kept: Kept | None = None,
        device: torch.device | None = None,
        transforms: DeviceTransforms | None = None,
        non_blocking: bool = True,
        prefetch: bool = True,
    ) -> None:
        dataset = as_dataset(dataset)
        if isinstance(dataset, Stream) and on_error != "raise":
            raise DataError(
                "data.on_error=skip cannot be kept for a stream, whose samples come once and in "
                "order: leave broken ones out in the stream itself, and set data.on_error=raise"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.max_skipped = max_skipped
        self.kept = kept
        self.device = device or torch.device("cpu")
        self.transforms = transforms
        self.skipped: list[Skipped] = []
        replacements = own_samples(sampler.updates) if on_error == "replace" else None
        self._fetcher = Fetcher(dataset, collate_fn or collate, seed, on_error, replacements)
        self._start = functools.partial(
            Workers,
            self._fetcher,
            num_workers,
            ahead=2 if prefetch_factor is None else prefetch_factor,
            timeout=timeout,
            init=worker_init_fn,
            context=multiprocessing_context,
        )
        self._pins = pin_memory and torch.accelerator.is_available()
        self._non_blocking = non_blocking
        self._ahead = prefetch and self.device.type == "cuda"
        self._workers: Workers | None = None
        self._busy = False  # an epoch was begun and has not ended
        self._interrupted: Callable[[], bool] = never

    def __len__(self) -> int:
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of updates `start` to `stop` of an epoch; none is replayed.

        Starting an epoch ends the one before.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        pieces = self.sampler.walk(epoch, start, stop)
        if callable(fill := getattr(self.dataset, "fill_cache", None)):
            fill(self._interrupted)  # before the workers start, so that they share it
        if self.kept is not None and not self._interrupted():
            self.kept.fill()
        if self._busy:  # workers load, or hang at, what nobody needs
            self.close(patient=False)
        if self.kept is not None and self.kept.ready:
            source: Iterator[MicroBatch] = (MicroBatch(None, piece) for piece in pieces)
        elif self.num_workers:
            source = self._from_workers(pieces)
        else:
            source = self._fetched_here(pieces)
        if self._ahead:
            yield from one_ahead(source, side_stream(self.device), self._moved)
        else:
            yield from map(self._moved, source)

    def heed(self, interrupted: Callable[[], bool]) -> None:
        """End the epoch as soon as `interrupted` returns true.

        It is called between two samples, or once a second while workers load. A sample that is
        being loaded is finished.
        """
        self._interrupted = interrupted
        if not self.num_workers:
            self._fetcher.interrupted = interrupted

    def close(self, patient: bool = True) -> None:
        """End the workers; those that hang (or all, if not `patient`) are killed."""
        workers, self._workers, self._busy = self._workers, None, False
        if workers is not None:
            workers.close(patient)

    def _fetched_here(self, pieces: Iterator[Piece]) -> Iterator[MicroBatch]:
        try:
            for piece in pieces:
                yield self._received(self._fetcher(piece))
        except BrokenOff:
            return

    def _from_workers(self, pieces: Iterator[Piece]) -> Iterator[MicroBatch]:
        self._workers = workers = self._workers or self._start()
        self._busy, ended = True, False
        try:
            for fetched in workers.load(pieces, self._interrupted):
                if fetched is None:
                    return
                yield self._received(fetched)
            ended = True
        finally:
            if self._workers is workers:
                self._busy = False
                if not (ended and self.persistent_workers):
                    self.close(patient=ended)

    def _received(self, fetched: Fetched) -> MicroBatch:
        """Return a micro-batch; raise its error, or that too many samples were left out."""
        if fetched.failure is not None:
            raise fetched.failure
        for entry in fetched.skipped:
            if all(entry.index != known.index for known in self.skipped):
                self.skipped.append(entry)
                logger.warning("data.on_error=skip: left out %s", entry.reason)
        if len(self.skipped) > self.max_skipped:
            listed = "; ".join(entry.reason for entry in self.skipped[:3])
            raise DataError(
                f"{len(self.skipped)} samples could not be loaded, more than "
                f"data.max_skipped={self.max_skipped}: {listed}"
            )
        batch = map_leaves(_pinned, fetched.batch) if self._pins else fetched.batch
        return MicroBatch(batch, fetched.piece)

    def _moved(self, micro: MicroBatch) -> MicroBatch:
        if self.kept is not None and self.kept.ready:
            batch = self.kept.batch(micro.piece.indices)
        else:
            batch = to_device(micro.batch, self.device, non_blocking=self._non_blocking)
        if self.transforms:
            batch = self.transforms(batch, micro.piece)
        return MicroBatch(batch, micro.piece)

    def skipped_state(self) -> list[list[Any]]:
        """Return the samples that were left out, as plain values for a checkpoint."""
        return [[entry.index, entry.path, entry.reason] for entry in self.skipped]

    def load_skipped_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Load the samples that were left out."""
        entries = {int(index): Skipped(int(index), path, str(why)) for index, path, why in state}
        self.skipped[:] = entries.values()


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


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
    """Launch each micro-batch before the previous one is yielded."""
    waiting: Any = None
    for micro in source:
        launched = stream.launch(move, micro)
        if waiting is not None:
            yield stream.collect(waiting)
        waiting = launched
    if waiting is not None:
        yield stream.collect(waiting)
