"""Load samples into batches, in this process or in worker processes.

The pool of worker processes is our own, although torch's DataLoader has one, for these reasons:

- torch sends a batch through /dev/shm, of which containers have 64 MB (pytorch/pytorch#5040). Where
  it was full, the worker printed the failure and the main process waited for ever (#1355). Here a
  batch is written to a file in memory (memfd), whose descriptor is sent over a socket; the receiver
  maps the file, so that tensors are not copied again.
- torch receives a batch without a timeout: a worker that is stopped while it sends one holds the
  run for ever. Here the main process waits for 8 bytes, and looks once a second whether the run is
  to stop, the worker lives and `loader.timeout` is over.
- A worker that is lost or hangs is reported with the sample that it was loading.
- Workers ignore the signals that end a run: the main process decides when they leave.
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
from multiprocessing.context import BaseContext
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
    occurrence_key,
    preserved_rng,
    seed_rng,
)
from regimen.data.sources import Interrupted

Collate = Callable[[Sequence[Any]], Any]
MAX_ATTEMPTS = 16  # to load a sample or one of its replacements

# A worker that died of a signal to the whole process group would take the emergency checkpoint
# with it.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

POLL_SECONDS = 1.0
GRACE_SECONDS = 2.0  # that workers have, all together, to leave by themselves
MAX_PREFETCH = 64  # batches of a worker: a socket's buffer holds so many messages
_ALIGNMENT = 64  # bytes
_SKIPPED = object()  # stands for a sample that could not be loaded

MEMORY_HINT = (
    "if memory ran out, lower loader.num_workers, loader.prefetch_factor or loader.batch_size; "
    "loader.num_workers=0 shows where the code fails"
)


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new first dimension.

    Like torch's `default_collate`, except that tuples stay tuples, and a field that is None in
    every sample stays None.
    """
    first = samples[0]
    if all(sample is None for sample in samples):
        return None
    if isinstance(first, Mapping):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, list | tuple):
        return rebuild(first, [collate(column) for column in zip(*samples, strict=True)])
    return default_collate(list(samples))


def collate_of(dataset: Any) -> Collate:
    """Return the data set's own `collate_batch`, where its samples do not stack; else `collate`."""
    own: Collate | None = getattr(dataset, "collate_batch", None)
    return own or collate


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


class LoadingStopped(Exception):  # noqa: N818 (nothing went wrong)
    """The remaining batches are not needed.

    Raised between two samples or while waiting for a worker, never inside users' code.
    """


def never_interrupted() -> bool:
    """Return False: nothing stops the loading."""
    return False


@dataclass(eq=False)
class Fetcher:
    """Load the samples of a slice and collate them.

    on_error: "raise", "replace" (by a sample that the broken one's index and the seed determine:
    the update stays whole) or "drop" (the slice shrinks: evaluation counts nothing twice).
    replacements: the samples that may take the place of others.
    interrupted: called before each sample.
    current_index: holds the index of the sample that is being loaded; shared memory in a worker.
    """

    dataset: Any
    collate: Collate
    seed: int
    on_error: str
    replacements: Sequence[int] | Indices
    interrupted: Interrupted = never_interrupted
    current_index: Any = field(default_factory=lambda: [-1])

    def __call__(self, batch_slice: BatchSlice) -> Fetched:
        """Return a slice's batch, or an error as a value. Raises LoadingStopped if interrupted."""
        try:
            return self._fetch(batch_slice)
        except LoadingStopped:
            raise
        except BaseException as error:
            if not is_fault(error):
                raise
            failure = memory_error(error) or _data_error(error, batch_slice)
            failure.add_note(traceback.format_exc())
            return Fetched(None, batch_slice, failure=failure)

    def load(
        self, batch_slices: Iterable[BatchSlice], interrupted: Interrupted
    ) -> Iterator[Fetched]:
        """Yield the batches of slices, in their order, until interrupted."""
        self.interrupted = interrupted
        with contextlib.suppress(LoadingStopped):
            yield from map(self, batch_slices)

    def describe(self, index: int) -> str:
        """Return a sample's index and, if its data set tells it, its file."""
        path = path_of(self.dataset, index)
        return f"sample {index} ({path})" if path else f"sample {index}"

    def _fetch(self, batch_slice: BatchSlice) -> Fetched:
        epoch = batch_slice.epoch
        begin_epoch = getattr(self.dataset, "begin_epoch", None)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(begin_epoch):
            begin_epoch(epoch, key(self.seed, SAMPLE, epoch))
        elif callable(set_epoch):
            set_epoch(epoch)

        if overrides_method(type(self.dataset), "batch", "__getitem__"):
            # A list: tensors and arrays take a tuple as one number for each dimension.
            batch = self.dataset.batch(list(batch_slice.indices))
            if batch is not None:
                return Fetched(batch, batch_slice)

        skipped: list[Skipped] = []
        with preserved_rng():
            if self.on_error == "drop":
                samples, batch_slice = self._load_or_drop(batch_slice, skipped)
            else:
                samples = [
                    self._load_or_replace(index, occurrence, epoch, skipped)
                    for index, occurrence in batch_slice.draws()
                ]
            return Fetched(self.collate(samples), batch_slice, skipped)

    def _load_or_replace(
        self, index: int, occurrence: int, epoch: int, skipped: list[Skipped]
    ) -> Any:
        """Load a sample, or a replacement, which is augmented with the sample's own key."""
        sample_key = self._sample_key(index, occurrence, epoch)
        candidate = index
        for attempt in range(MAX_ATTEMPTS):
            sample = self._load(candidate, sample_key, skipped)
            if sample is not _SKIPPED:
                return sample
            position = key(self.seed, REPLACEMENT, index, attempt) % len(self.replacements)
            candidate = int(self.replacements[position])
        raise DataError(f"sample {index} and {MAX_ATTEMPTS - 1} replacements could not be loaded")

    def _load_or_drop(
        self, batch_slice: BatchSlice, skipped: list[Skipped]
    ) -> tuple[list[Any], BatchSlice]:
        """Load the samples that can be loaded; return them and their slice.

        If none can be loaded, the slice has one sample and `count` 0.
        """
        draws = batch_slice.draws()
        samples = list[Any]()
        loaded = list[tuple[int, int]]()
        for index, occurrence in draws:
            sample_key = self._sample_key(index, occurrence, batch_slice.epoch)
            sample = self._load(index, sample_key, skipped)
            if sample is not _SKIPPED:
                samples.append(sample)
                loaded.append((index, occurrence))

        if len(loaded) == len(draws):
            return samples, batch_slice
        count = len(loaded) if batch_slice.count else 0
        if not loaded:
            # Files of a data set without labels may all be broken: it then has a blank sample.
            stand_in = getattr(self.dataset, "stand_in", None)
            if callable(stand_in):
                samples = [stand_in()]
            else:
                samples = [self._load_or_replace(*draws[0], batch_slice.epoch, skipped)]
            loaded = draws[:1]
        indices, occurrences = zip(*loaded, strict=True)
        return samples, replace(batch_slice, indices=indices, occurrences=occurrences, count=count)

    def _sample_key(self, index: int, occurrence: int, epoch: int) -> int:
        return occurrence_key(key(self.seed, SAMPLE, epoch, index), occurrence)

    def _load(self, index: int, sample_key: int, skipped: list[Skipped]) -> Any:
        """Return a sample, its random draws keyed; `_SKIPPED` if it is left out."""
        if self.interrupted():
            raise LoadingStopped
        self.current_index[0] = index
        seed_rng(sample_key)
        try:
            return self.dataset[index]
        except BaseException as error:
            if memory_error(error) or not is_fault(error):
                raise
            path = path_of(self.dataset, index)
            text = str(error) if isinstance(error, DataError) else reason(error)
            if isinstance(error, UnreadableError) and self.on_error == "raise":
                text = f"{text}; data.on_error=skip leaves such samples out"
            sample = f"sample {index}" if str(path) in text else self.describe(index)
            failure = DataError(f"{sample}: {text}")
            if self.on_error == "raise":
                raise failure from error
            skipped.append(Skipped(index, path, str(failure)))
            return _SKIPPED


def overrides_method(kind: type, method: str, *alternatives: str) -> bool:
    """Return whether a class has a method that is still valid for its samples.

    It is not if a subclass of the class that defines it defines one of `alternatives`: the
    subclass then makes its samples in another way.
    """
    for base in kind.__mro__:
        if method in vars(base):
            return True
        if any(name in vars(base) for name in alternatives):
            return False
    return False


def path_of(dataset: Any, index: int) -> str | None:
    """Return the file of a sample, or None if its data set has no method `path`."""
    path = getattr(dataset, "path", None)
    return path(index) if callable(path) else None


def memory_error(error: BaseException) -> WorkerError | None:
    """Return a WorkerError for an exception that shows that memory ran out, or None."""
    return WorkerError(f"out of memory: {reason(error)}") if lacks_memory(error) else None


def _data_error(error: BaseException, batch_slice: BatchSlice) -> DataError:
    if isinstance(error, DataError):
        return DataError(str(error))
    indices = ", ".join(map(str, batch_slice.indices[:6]))
    return DataError(
        f"samples {indices} cannot be put into a batch (do their shapes and types "
        f"agree? see transforms, loader.collate_fn): {reason(error)}"
    )


@dataclass(eq=False)
class Workers:
    """Worker processes, which take the slices of an epoch in rotation.

    prefetch_factor: slices that each worker is sent before its batch is needed.
    timeout: seconds to wait for a batch; 0 = no limit.
    init_fn: called in each worker with its number.
    context: how processes are started ("fork", "spawn", "forkserver"); None: Python's default.

    Raises WorkerError if they cannot be started, DataError if the data set cannot be sent to them.
    """

    fetcher: Fetcher
    num_workers: int
    prefetch_factor: int
    timeout: float
    init_fn: Callable[[int], object] | None
    context: str | None

    def __post_init__(self) -> None:
        self.prefetch_factor = min(self.prefetch_factor, MAX_PREFETCH)
        self.processes = list[BaseProcess]()
        self._channels = list[socket.socket]()
        context = multiprocessing.get_context(self.context)
        self._current_indices = [context.RawArray("q", [-1]) for _ in range(self.num_workers)]
        # At the end of the program, before multiprocessing waits for its daemons: it sends them
        # SIGTERM, which they ignore.
        self._end = Finalize(self, _end, (self._channels, self.processes), exitpriority=1)

        # Blocked until a worker ignores them, so that no signal hits it before.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            for worker in range(self.num_workers):
                self._start(context, worker)
        except (OSError, MemoryError) as error:
            self.close(patient=False)
            raise WorkerError(
                f"the loader's workers cannot be started; {MEMORY_HINT}: {reason(error)}"
            ) from error
        except Exception as error:
            self.close(patient=False)
            raise DataError(
                f"the data set cannot be sent to worker processes ({reason(error)}): make it "
                "picklable, or set loader.num_workers=0 or loader.multiprocessing_context=fork"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def _start(self, context: BaseContext, worker: int) -> None:
        channel, worker_channel = socket.socketpair()
        self._channels.append(channel)
        current_index = self._current_indices[worker]
        arguments = (worker_channel, self.fetcher, worker, current_index, self.init_fn)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with worker_channel:
            process.start()
        self.processes.append(process)

    def load(
        self, batch_slices: Iterable[BatchSlice], interrupted: Interrupted
    ) -> Iterator[Fetched]:
        """Yield the batches of slices, in their order, until interrupted.

        Raises WorkerError if a worker is lost, or hangs.
        """
        pending = deque[int]()  # the workers that batches are expected from, in order
        rotation = itertools.cycle(range(len(self.processes)))
        with contextlib.suppress(LoadingStopped):
            for worker, batch_slice in zip(rotation, batch_slices, strict=False):
                try:
                    _send(self._channels[worker], batch_slice)
                except ConnectionError as error:
                    raise self._lost(worker) from error
                pending.append(worker)
                if len(pending) > self.prefetch_factor * len(self.processes):
                    yield self._receive_from(pending.popleft(), interrupted)
            while pending:
                yield self._receive_from(pending.popleft(), interrupted)

    def close(self, patient: bool = True) -> None:
        """End the workers; those that stay (or all, if not `patient`) are killed."""
        if not patient:
            for process in self.processes:
                process.kill()
        self._end()

    def _receive_from(self, worker: int, interrupted: Interrupted) -> Fetched:
        """Wait for a worker's next batch."""
        channel = self._channels[worker]
        poll = min(POLL_SECONDS, self.timeout or POLL_SECONDS)
        channel.settimeout(poll)
        # Polls are counted instead of reading a clock: the time in which this process itself was
        # stopped does not count.
        for polls in itertools.count(1):
            try:
                fetched = _receive(channel)
                break
            except TimeoutError:
                if interrupted():
                    raise LoadingStopped from None
                if not self.processes[worker].is_alive():
                    raise self._lost(worker) from None
                if self.timeout and polls * poll >= self.timeout:
                    raise WorkerError(
                        f"loader worker {worker} gave no batch for {self.timeout:g} s "
                        f"(loader.timeout) at {self._current_sample(worker)}; raise loader.timeout "
                        "if it is only slow; if its code calls torch.set_num_threads, which waits "
                        "for ever in a forked process, set "
                        "loader.multiprocessing_context=forkserver"
                    ) from None
            except (EOFError, ConnectionError) as error:
                raise self._lost(worker) from error
        if isinstance(fetched, Exception):
            raise WorkerError(f"the loader's workers failed: {reason(fetched)}; {MEMORY_HINT}")
        return fetched  # type: ignore[no-any-return]

    def _lost(self, worker: int) -> WorkerError:
        """Return an error that says how a worker ended, and on which sample."""
        process = self.processes[worker]
        process.join(GRACE_SECONDS)
        code = process.exitcode or 0
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        else:
            end = f"left with exit code {code}"
        sample = self._current_sample(worker)
        return WorkerError(
            f"loader worker {worker} (pid {process.pid}) {end} at {sample}; {MEMORY_HINT}"
        )

    def _current_sample(self, worker: int) -> str:
        index = self._current_indices[worker][0]
        return "no sample yet" if index < 0 else self.fetcher.describe(index)


def _end(channels: Sequence[socket.socket], processes: Sequence[BaseProcess]) -> None:
    for channel in channels:
        with channel, contextlib.suppress(OSError):  # the worker may be gone
            _send(channel, None)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _run_worker(
    channel: socket.socket, fetcher: Fetcher, worker: int, current_index: Any, init_fn: Any
) -> None:
    """Fetch slices until None arrives, or the parent is gone."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    # The workers share the cores. Besides, if this process is a fork of one in which torch has
    # computed with several threads, these threads are gone, and torch would wait for them for ever.
    torch.set_num_threads(1)
    seed_rng(key(fetcher.seed, LOADER, worker))
    fetcher.current_index = current_index
    parent = os.getppid()
    channel.settimeout(5.0)
    try:
        if init_fn is not None:
            init_fn(worker)
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
                failure = memory_error(error) or DataError(
                    f"a batch cannot be sent from a worker process ({reason(error)}): let samples "
                    "hold tensors and plain values, or loader.num_workers=0"
                )
                _send(channel, Fetched(None, fetched.batch_slice, failure=failure))


class _Pickler(pickle.Pickler):
    """Keep the content of plain tensors apart from the pickle, so that it is written uncopied."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        content = value.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(content.numpy()), value.dtype, value.shape)  # type: ignore[arg-type]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether bytes, dtype and shape are all that a tensor consists of."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    # A tensor without elements has no buffer that could be mapped.
    return tensor.numel() > 0 and not (tensor.is_quantized or tensor.requires_grad)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)


def _send(channel: socket.socket, value: Any) -> None:
    """Write a value to a file in memory, and send the file's descriptor.

    The file holds the pickled list of the parts' lengths, then the parts, each aligned: the pickle
    of the value and the contents of its tensors. The message is the length of that list.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(value)
    parts = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    lengths = pickle.dumps([len(part) for part in parts])
    with memory_file() as file:
        file.write(lengths)
        for part in parts:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(part)
        file.flush()
        message = len(lengths).to_bytes(8)
        socket.send_fds(channel, [message], [file.fileno()])


def _receive(channel: socket.socket) -> Any:
    """Return what was sent; its tensors lie in the file's memory. Raises EOFError at the end."""
    message, descriptors, *_ = socket.recv_fds(channel, 8, 1)
    if not message:
        raise EOFError
    with open(descriptors[0], "r+b") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0))
    position = int.from_bytes(message)
    lengths = pickle.loads(content[:position])
    parts = []
    for length in lengths:
        position += -position % _ALIGNMENT
        parts.append(content[position : position + length])
        position += length
    return pickle.loads(parts[0], buffers=parts[1:])
