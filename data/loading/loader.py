"""Load the micro-batches of a data set, from any position in an epoch."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from data.batch import MicroBatch, Piece
from data.errors import DataError, WorkerError
from data.keys import LOADER, key
from data.loading.collate import collate
from data.loading.fetch import Collate, Fetched, Fetcher, Skipped, never
from data.loading.kept import Kept
from data.loading.watchdog import Watchdog
from data.loading.workers import (
    HINT,
    WorkerInit,
    abandon_start,
    hurried,
    kill,
    kill_at_exit,
    memory_error,
    shielded_start,
    start_failure,
    worker_exit_message,
)
from data.samplers import own_samples
from data.streams import Stream, as_dataset
from data.updates import UpdateSampler

logger = logging.getLogger(__name__)

# Seconds between checks of the workers: a dead one is found within this time.
_LOOK = 1.0


class _Source:
    """The batch sampler that the DataLoader sees: the pieces of the current epoch."""

    def __init__(self) -> None:
        self.pieces: Iterator[Piece] = iter(())

    def __iter__(self) -> Iterator[Piece]:
        return self.pieces


def _shared(tensor: torch.Tensor, num_workers: int) -> torch.Tensor:
    """Move a tensor to memory that is shared with the workers, if there are any."""
    try:
        return tensor.share_memory_() if num_workers else tensor  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if failure := memory_error(error):
            raise failure from error
        raise


def _as_is(fetched: Fetched) -> Fetched:
    return fetched


class Loader:
    """Load the micro-batches of one rank.

    The arguments are torch's DataLoader's (`timeout` in seconds, 0 = without end). Those about
    workers are ignored without workers. `in_order=False` and `generator` are not offered: the
    order is a pure function of the sampler's.

    on_error: "raise" a DataError; "replace" a broken sample by one that (seed, index) determine; or
    "drop" it, for evaluation. More than `max_skipped` different ones are a DataError in any case.

    kept: the data set on the device. Once it is there, micro-batches have no batch, and no workers
    are started: `OnDevice` gathers what their pieces say.
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
        multiprocessing_context: str | BaseContext | None = None,
        on_error: Literal["raise", "replace", "drop"] = "raise",
        max_skipped: int = 0,
        kept: Kept | None = None,
    ) -> None:
        dataset = as_dataset(dataset)
        if isinstance(dataset, Stream) and on_error != "raise":
            raise DataError(
                "data.on_error=skip cannot be kept for a stream, whose samples come once and in "
                "order: leave broken ones out in the stream itself, and set data.on_error=raise"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.timeout = timeout if num_workers else 0.0
        self.max_skipped = max_skipped
        self.kept = kept
        self.skipped: list[Skipped] = []
        self._watch = _shared(torch.full((max(num_workers, 1),), -1), num_workers)
        replacements = own_samples(sampler.updates) if on_error == "replace" else None
        self._fetcher = Fetcher(
            dataset, collate_fn or collate, seed, on_error, self._watch, replacements
        )
        self._source = _Source()
        self._workers: list[BaseProcess] = []
        self._watchdog = Watchdog(0, ())
        self._iterator: Iterator[Fetched] | None = None
        self._interrupted: Callable[[], bool] = never
        self._received = 0
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory and torch.accelerator.is_available(),
            "timeout": _LOOK if num_workers else 0.0,
            "worker_init_fn": WorkerInit(worker_init_fn),
            "multiprocessing_context": multiprocessing_context if num_workers else None,
            # Without a generator of its own, each epoch would draw from the global one.
            "generator": torch.Generator().manual_seed(key(seed, LOADER)),
            "prefetch_factor": prefetch_factor if num_workers else None,
            "persistent_workers": persistent_workers and num_workers > 0,
        }
        if num_workers:
            self._loader = self._torch_loader()
            kill_at_exit(self)

    def __len__(self) -> int:
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of updates `start` to `stop` of an epoch; none is replayed.

        Starting an epoch ends the one before.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        self._source.pieces = self.sampler.walk(epoch, start, stop)
        self._received = 0
        if callable(fill := getattr(self.dataset, "fill_cache", None)):
            fill(self._interrupted)  # before the workers start, so that they share it
        if self.kept is not None and not self._interrupted():
            self.kept.fill()
        iterator = self._begin()
        try:
            while (fetched := self._next(iterator)) is not None:
                yield MicroBatch(fetched.batch, fetched.piece)
        finally:
            if self._iterator is iterator and not self._options["persistent_workers"]:
                self.close()

    def heed(self, interrupted: Callable[[], bool]) -> None:
        """End the epoch as soon as `interrupted` returns true.

        It is called between two samples, or once a second while workers load. A sample that is
        being loaded is finished.
        """
        self._interrupted = interrupted
        if not self._options["num_workers"]:
            self._fetcher.interrupted = interrupted

    def close(self, patient: bool = True) -> None:
        """End the workers; those that hang (or all, if not `patient`) are killed."""
        iterator, workers = self._iterator, self._workers
        self._iterator, self._workers = None, []
        self._watchdog.end()
        if not patient:
            kill(workers)
        if workers and iterator is not None:
            with hurried(workers):
                iterator._shutdown_workers()  # type: ignore[attr-defined]
            kill(workers)

    def _torch_loader(self) -> DataLoader[Fetched]:
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_sampler=self._source,  # type: ignore[arg-type]
            collate_fn=_as_is,  # type: ignore[arg-type]
            **self._options,
        )

    def _begin(self) -> Iterator[Fetched]:
        if self.kept is not None and self.kept.ready:
            return (Fetched(None, piece) for piece in self._source.pieces)
        if self._options["num_workers"] == 0:
            return map(self._fetch_here, self._source.pieces)
        if self._workers:
            # Workers are busy, or hang, after an epoch that was left early: start new ones.
            with contextlib.suppress(RuntimeError):
                self._iterator = iter(self._loader)
                return self._iterator
            self.close(patient=False)
        return self._start_workers()

    def _fetch_here(self, piece: Piece) -> Fetched:
        """Fetch without workers and torch's DataLoader, which would take as long as the batch."""
        fetched = self._fetcher.__getitems__(piece)
        return fetched.pin_memory() if self._options["pin_memory"] else fetched

    def _start_workers(self) -> Iterator[Fetched]:
        try:
            self._loader = self._torch_loader()
            with shielded_start():
                iterator = iter(self._loader)
        except Exception as error:
            abandon_start(error)
            if failure := start_failure(error):
                raise failure from error
            raise
        self._iterator, self._workers = iterator, list(iterator._workers)  # type: ignore[attr-defined]
        self._watchdog = Watchdog(self.timeout, self._workers)
        return iterator

    def _next(self, iterator: Iterator[Fetched]) -> Fetched | None:
        """Return the next batch; raise its error, or WorkerError if a worker is lost.

        None at the end, and if interrupted.
        """
        fetched = self._wait(iterator)
        if fetched is None or fetched.broken_off:
            return None
        self._received += 1
        if fetched.failure is not None:
            raise fetched.failure
        self._note(fetched.skipped)
        return fetched

    def _wait(self, iterator: Iterator[Fetched]) -> Fetched | None:
        since = time.monotonic()
        while True:
            try:
                with self._watchdog:
                    return next(iterator, None)
            except Exception as error:
                if not self._workers:
                    raise
                if self._interrupted():
                    self.close(patient=False)  # they load what is no longer needed
                    return None
                waited = time.monotonic() - since
                late = self.timeout and waited >= self.timeout
                if late or "timed out" not in str(error):
                    raise self._lost(error) from error

    def skipped_state(self) -> list[list[Any]]:
        """Return the samples that were left out, as plain values for a checkpoint."""
        return [[entry.index, entry.path, entry.reason] for entry in self.skipped]

    def load_skipped_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Load the samples that were left out."""
        entries = {int(index): Skipped(int(index), path, str(why)) for index, path, why in state}
        self.skipped[:] = entries.values()

    def _note(self, skipped: tuple[Skipped, ...]) -> None:
        known = {entry.index for entry in self.skipped}
        for entry in skipped:
            if entry.index not in known:
                known.add(entry.index)
                self.skipped.append(entry)
                logger.warning("data.on_error=skip: left out %s", entry.reason)
        if len(self.skipped) > self.max_skipped:
            listed = "; ".join(entry.reason for entry in self.skipped[:3])
            raise DataError(
                f"{len(self.skipped)} samples could not be loaded, more than "
                f"data.max_skipped={self.max_skipped}: {listed}"
            )

    def _lost(self, error: Exception) -> WorkerError:
        """Kill the workers; return an error that says which one died or hangs."""
        message = self._explain(error)
        with contextlib.suppress(Exception):
            self.close(patient=False)
        return WorkerError(message)

    def _explain(self, error: Exception) -> str:
        hangs = self._watchdog.has_bitten
        for number, worker in enumerate(self._workers):
            if not hangs and not worker.is_alive():
                return worker_exit_message(number, worker, self._loading(number))
        if hangs or "timed out" in str(error):
            # torch assigns the pieces of an epoch to its workers in turn.
            number = self._received % len(self._workers)
            return (
                f"loader worker {number} gave no batch for {self.timeout:g} s (loader.timeout) "
                f"at {self._loading(number)}; raise loader.timeout if it is only slow"
            )
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return f"the loader's workers failed: {last[0]}; {HINT}"

    def _loading(self, worker: int) -> str:
        index = int(self._watch[worker])
        return "no sample yet" if index < 0 else self._fetcher.name(index)
