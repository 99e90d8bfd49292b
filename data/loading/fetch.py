"""Fetch micro-batches: each sample keyed, collated, errors as values; here or in worker processes.

Not torch's DataLoader: it receives a batch without a timeout, so that a worker that is stopped
holds the run for ever, and it sends one through /dev/shm, of which containers have 64 MB. Here a
batch is written to a file in memory, whose descriptor is sent: the main process waits for a few
bytes, with a timeout, and maps the file. Tensors are not copied again.
"""

import contextlib
import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from regimen.conf.errors import lacks_memory
from regimen.data.batch import BatchSlice, rebuild
from regimen.data.errors import DataError, UnreadableError, WorkerError, is_fault, reason
from regimen.data.image_folder import memory_file
from regimen.data.keys import (
    LOADER,
    REPLACEMENT,
    SAMPLE,
    Indices,
    key,
    of_occurrence,
    preserved_rng,
    seed_rng,
)
from regimen.data.sources import Interrupted

Collate = Callable[[Sequence[Any]], Any]
REPLACEMENTS = 16  # attempts to replace a broken sample

# The parent decides when a run ends; a worker that died of a signal to the whole process group
# would take the emergency checkpoint with it.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

_LOOK = 1.0  # seconds between two looks whether to go on waiting
_MOMENT = 2.0  # seconds that workers have, all together, to leave by themselves
_ALIGNED = 64  # bytes at a multiple of which each tensor begins

HINT = (
    "if memory ran out, lower loader.num_workers, loader.prefetch_factor or loader.batch_size; "
    "loader.num_workers=0 shows where the code fails"
)


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


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be loaded and was left out."""

    index: int
    path: str | None
    reason: str


@dataclass(slots=True)
class Fetched:
    """A batch, or the error that the main process raises: both may come from a worker."""

    batch: Any
    batch_slice: BatchSlice
    skipped: Sequence[Skipped] = ()
    failure: Exception | None = None


class BrokenOff(Exception):  # noqa: N818 (nothing went wrong)
    """Pieces are no longer needed. Raised between two samples, outside users' code, or waiting."""


def never() -> bool:
    """Return False: nothing interrupts the loading."""
    return False


@dataclass(eq=False)
class Fetcher:
    """Load the samples of a slice and put them together.

    on_error: "raise", "replace" (by a sample that the broken one's index and the seed determine:
    the update stays whole) or "drop" (the slice shrinks: evaluation counts nothing twice).
    `replacements`: the samples that may stand in for others.
    """

    dataset: Any
    collate: Collate
    seed: int
    on_error: str
    replacements: Sequence[int] | Indices
    interrupted: Interrupted = never  # asked before each sample
    # The index that is being loaded: a worker shares it with the main process.
    watch: Any = field(default_factory=lambda: [-1])

    def __call__(self, batch_slice: BatchSlice) -> Fetched:
        """Return a slice's batch, or an error as a value. Raises BrokenOff if interrupted."""
        try:
            return self._fetch(batch_slice)
        except BaseException as error:
            if isinstance(error, BrokenOff) or not is_fault(error):
                raise
            text = str(error)
            if not isinstance(error, DataError):
                shown = ", ".join(map(str, batch_slice.indices[:6]))
                text = (
                    f"samples {shown} cannot be put into a batch (do their shapes and types "
                    f"agree? see transforms, loader.collate_fn): {reason(error)}"
                )
            failure = memory_error(error) or DataError(text)
            failure.add_note(traceback.format_exc())
            return Fetched(None, batch_slice, failure=failure)

    def load(
        self, batch_slices: Iterable[BatchSlice], interrupted: Interrupted
    ) -> Iterator[Fetched]:
        """Yield what is fetched of slices, in their order, until interrupted."""
        self.interrupted = interrupted
        with contextlib.suppress(BrokenOff):
            yield from map(self, batch_slices)

    def name(self, index: int) -> str:
        """Name a sample by its index and, where there is one, its file."""
        path = path_of(self.dataset, index)
        return f"sample {index}" + (f" ({path})" if path else "")

    def _fetch(self, batch_slice: BatchSlice) -> Fetched:
        if callable(begin := getattr(self.dataset, "begin_epoch", None)):
            begin(batch_slice.epoch, key(self.seed, SAMPLE, batch_slice.epoch))
        elif callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(batch_slice.epoch)
        if offers(type(self.dataset), "batch", "__getitem__"):
            # A list: tensors and arrays take a tuple as one number for each dimension.
            batch = self.dataset.batch(list(batch_slice.indices))
            if batch is not None:
                return Fetched(batch, batch_slice)
        skipped: list[Skipped] = []
        with preserved_rng():
            if self.on_error == "drop":
                samples, batch_slice = self._kept(batch_slice, skipped)
            else:
                samples = [
                    self._replaced(*draw, batch_slice.epoch, skipped)
                    for draw in batch_slice.draws()
                ]
            return Fetched(self.collate(samples), batch_slice, skipped)

    def _replaced(self, index: int, occurrence: int, epoch: int, skipped: list[Skipped]) -> Any:
        """Load one sample or its replacement, which is drawn for with the sample's own key."""
        candidate, own_key = index, self._key_of(index, occurrence, epoch)
        for attempt in range(REPLACEMENTS):
            if found := self._loaded(candidate, own_key, skipped):
                return found[0]
            drawn = key(self.seed, REPLACEMENT, index, attempt) % len(self.replacements)
            candidate = int(self.replacements[drawn])
        raise DataError(f"sample {index} and {REPLACEMENTS - 1} replacements could not be loaded")

    def _kept(
        self, batch_slice: BatchSlice, skipped: list[Skipped]
    ) -> tuple[list[Any], BatchSlice]:
        """Load the samples that can be loaded; an empty slice gets a sample and `count` 0."""
        draws = batch_slice.draws()
        samples = list[Any]()
        kept = list[tuple[int, int]]()
        for index, occurrence in draws:
            found = self._loaded(index, self._key_of(index, occurrence, batch_slice.epoch), skipped)
            if found:
                samples += found
                kept.append((index, occurrence))
        if not kept:  # of files without labels all may be broken
            own = getattr(self.dataset, "stand_in", None)
            stand_in = (
                own() if callable(own) else self._replaced(*draws[0], batch_slice.epoch, skipped)
            )
            first = batch_slice.indices[:1]
            return [stand_in], replace(
                batch_slice, indices=first, occurrences=batch_slice.occurrences[:1], count=0
            )
        if len(kept) < len(draws):
            indices, occurrences = zip(*kept, strict=True)
            count = len(kept) if batch_slice.count else 0
            batch_slice = replace(
                batch_slice, indices=indices, occurrences=occurrences, count=count
            )
        return samples, batch_slice

    def _key_of(self, index: int, occurrence: int, epoch: int) -> int:
        return of_occurrence(key(self.seed, SAMPLE, epoch, index), occurrence)

    def _loaded(self, index: int, own_key: int, skipped: list[Skipped]) -> list[Any]:
        """Return a sample, drawn for with a key; none where it is left out."""
        if self.interrupted():
            raise BrokenOff
        self.watch[0] = index
        seed_rng(own_key)
        try:
            return [self.dataset[index]]
        except BaseException as error:
            if memory_error(error) or not is_fault(error):
                raise
            path = path_of(self.dataset, index)
            text = str(error) if isinstance(error, DataError) else reason(error)
            if isinstance(error, UnreadableError) and self.on_error == "raise":
                text = f"{text}; data.on_error=skip leaves such samples out"
            where = f"sample {index}" if str(path) in text else self.name(index)
            failure = DataError(f"{where}: {text}")
            if self.on_error == "raise":
                raise failure from error
            skipped.append(Skipped(index, path, str(failure)))
            return []


def offers(kind: type, method: str, *other_ways: str) -> bool:
    """Return whether a class has a method, and no subclass of its owner another way to a sample."""
    for base in kind.__mro__:
        if method in vars(base):
            return True
        if any(other in vars(base) for other in other_ways):
            return False
    return False


def path_of(dataset: Any, index: int) -> str | None:
    """Return the file of a sample, if its data set can tell."""
    path = getattr(dataset, "path", None)
    return path(index) if callable(path) else None


def memory_error(error: BaseException) -> WorkerError | None:
    """Say in words how an exception shows that memory gave out; None if it does not."""
    return WorkerError(f"out of memory: {reason(error)}") if lacks_memory(error) else None


@dataclass(eq=False)
class Workers:
    """So many processes, which take the slices of an epoch in turn.

    ahead: slices that each has before its batch is needed.
    timeout: seconds to wait for a batch; 0 = without end.
    """

    fetcher: Fetcher
    number: int
    ahead: int
    timeout: float
    init: Callable[[int], object] | None
    context: str | None

    def __post_init__(self) -> None:
        self.ahead = min(self.ahead, 64)  # no more messages than a channel holds
        self.processes = list[BaseProcess]()
        self._channels = list[socket.socket]()
        start = multiprocessing.get_context(self.context)
        self._watch = [start.RawArray("q", [-1]) for _ in range(self.number)]
        # Before multiprocessing waits for its daemons, which would ignore its SIGTERM.
        self._end = Finalize(self, _end, (self._channels, self.processes), exitpriority=1)
        # No signal hits a worker before it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            for worker in range(self.number):
                ours, theirs = socket.socketpair()
                self._channels.append(ours)
                arguments = (theirs, self.fetcher, worker, self._watch[worker], self.init)
                process = start.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
                with theirs:
                    process.start()
                self.processes.append(process)
        except Exception as error:
            self.close(patient=False)
            if isinstance(error, OSError | MemoryError):
                said = f"the loader's workers cannot be started; {HINT}: {reason(error)}"
                raise WorkerError(said) from error
            why = f"the data set cannot be sent to worker processes ({reason(error)})"
            keys = "loader.num_workers=0 or loader.multiprocessing_context=fork"
            raise DataError(f"{why}: make it picklable, or set {keys}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def load(
        self, batch_slices: Iterable[BatchSlice], interrupted: Interrupted
    ) -> Iterator[Fetched]:
        """Yield what is fetched of slices, in their order, until interrupted.

        Raises WorkerError if a worker is lost, or hangs.
        """
        waiting = deque[int]()
        turns = itertools.cycle(range(len(self.processes)))
        with contextlib.suppress(BrokenOff):
            for worker, batch_slice in zip(turns, batch_slices, strict=False):
                try:
                    _send(self._channels[worker], batch_slice)
                except ConnectionError as error:
                    raise self._lost(worker) from error
                waiting.append(worker)
                if len(waiting) > self.ahead * len(self.processes):
                    yield self._next(waiting.popleft(), interrupted)
            while waiting:
                yield self._next(waiting.popleft(), interrupted)

    def close(self, patient: bool = True) -> None:
        """End the workers; those that stay (or all, if not `patient`) are killed."""
        if not patient:
            for process in self.processes:
                process.kill()
        self._end()

    def _next(self, worker: int, interrupted: Interrupted) -> Fetched:
        channel, look = self._channels[worker], min(_LOOK, self.timeout or _LOOK)
        channel.settimeout(look)
        # Looks are counted: the time in which this process was stopped itself is not.
        for looks in itertools.count(1):
            try:
                fetched = _receive(channel)
                break
            except TimeoutError:
                if interrupted():
                    raise BrokenOff from None
                if not self.processes[worker].is_alive():
                    raise self._lost(worker) from None
                if self.timeout and looks * look >= self.timeout:
                    late = f"gave no batch for {self.timeout:g} s (loader.timeout)"
                    at = f"{self._sample(worker)}; raise loader.timeout if it is only slow"
                    raise WorkerError(
                        f"loader worker {worker} {late} at {at}; if its code calls "
                        "torch.set_num_threads, which waits for ever in a forked process, set "
                        "loader.multiprocessing_context=forkserver"
                    ) from None
            except (EOFError, ConnectionError) as error:
                raise self._lost(worker) from error
        if isinstance(fetched, Exception):
            raise WorkerError(f"the loader's workers failed: {reason(fetched)}; {HINT}")
        return fetched  # type: ignore[no-any-return]

    def _lost(self, worker: int) -> WorkerError:
        """Return an error that says how a worker ended, and on which sample."""
        process = self.processes[worker]
        process.join(_MOMENT)
        code = process.exitcode or 0
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        end = killed or f"left with exit code {code}"
        who = f"loader worker {worker} (pid {process.pid})"
        return WorkerError(f"{who} {end} at {self._sample(worker)}; {HINT}")

    def _sample(self, worker: int) -> str:
        index = self._watch[worker][0]
        return "no sample yet" if index < 0 else self.fetcher.name(index)


def _end(channels: Sequence[socket.socket], processes: Sequence[BaseProcess]) -> None:
    for channel in channels:
        with channel, contextlib.suppress(OSError):  # it may be gone
            _send(channel, None)
    deadline = time.monotonic() + _MOMENT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _work(channel: socket.socket, fetcher: Fetcher, worker: int, watch: Any, init: Any) -> None:
    """Fetch slices until there is None, or the parent is gone."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    # The workers share the cores. And where this process is a fork of one in which torch has
    # computed with several threads, these are gone: torch would wait for them for ever.
    torch.set_num_threads(1)
    seed_rng(key(fetcher.seed, LOADER, worker))
    fetcher.watch = watch
    parent = os.getppid()
    channel.settimeout(5.0)
    try:
        if init is not None:
            init(worker)
    except Exception as error:
        _send(channel, WorkerError(reason(error)))
        return
    with contextlib.suppress(EOFError, ConnectionError):
        while os.getppid() == parent:
            try:
                batch_slice = _receive(channel)
            except TimeoutError:
                continue
            if batch_slice is None:
                return
            fetched = fetcher(batch_slice)
            try:
                _send(channel, fetched)
            except ConnectionError:
                raise
            except Exception as error:
                text = f"a batch cannot be sent from a worker process ({reason(error)})"
                way_out = "let samples hold tensors and plain values, or loader.num_workers=0"
                failure = memory_error(error) or DataError(f"{text}: {way_out}")
                _send(channel, Fetched(None, fetched.batch_slice, failure=failure))


class _Pickler(pickle.Pickler):
    """Leave the numbers of plain tensors out, however deep in a batch: they are written as is."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or not value.numel():
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized or value.requires_grad:
            return NotImplemented
        numbers: Any = value.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), value.dtype, value.shape)


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.uint8).view(dtype).view(shape)


def _send(channel: socket.socket, value: Any) -> None:
    """Write a value to a file in memory, and send that."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(value)
    parts = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    lengths = pickle.dumps([len(part) for part in parts])
    with memory_file() as file:
        file.write(lengths)
        for part in parts:
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(part)
        file.flush()
        socket.send_fds(channel, [len(lengths).to_bytes(8)], [file.fileno()])


def _receive(channel: socket.socket) -> Any:
    """Return what was sent; its tensors lie in the file's memory. Raises EOFError at the end."""
    message, files, *_ = socket.recv_fds(channel, 8, 1)
    if not message:
        raise EOFError
    with open(files[0], "r+b") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0))
    first = int.from_bytes(message)
    parts, position = [], first
    for length in pickle.loads(content[:first]):
        position += -position % _ALIGNED
        parts.append(content[position : position + length])
        position += length
    return pickle.loads(parts[0], buffers=parts[1:])
