"""Processes that fetch a loader's pieces: their batches, signals, deaths and end.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from data.batch import Piece
from data.errors import DataError, WorkerError, reason
from data.keys import LOADER, key, seed_rng
from data.loading.cache import memory_file
from data.loading.fetch import Fetched, Fetcher, memory_error

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


class Workers:
    """So many processes, which take the pieces of an epoch in turn.

    ahead: pieces that each has before its batch is needed.
    timeout: seconds to wait for a batch; 0 = without end.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        number: int,
        *,
        ahead: int = 2,
        timeout: float = 0.0,
        init: Callable[[int], object] | None = None,
        context: str | None = None,
    ) -> None:
        self.fetcher = fetcher
        self.ahead = min(ahead, 64)  # no more messages than a channel holds
        self.timeout = timeout
        self.processes: list[BaseProcess] = []
        self._channels: list[socket.socket] = []
        start = multiprocessing.get_context(context)
        self._watch = start.RawArray("q", [-1] * number)
        # Before multiprocessing waits for its daemons, which would ignore its SIGTERM.
        self._end = Finalize(self, _end, (self._channels, self.processes), exitpriority=1)
        # No signal hits a worker before it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            for worker in range(number):
                ours, theirs = socket.socketpair()
                self._channels.append(ours)
                arguments = (theirs, fetcher, worker, self._watch, init)
                process = start.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
                with theirs:
                    process.start()
                self.processes.append(process)
        except Exception as error:
            self.close(patient=False)
            raise _start_failure(error) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def load(
        self, pieces: Iterable[Piece], interrupted: Callable[[], bool]
    ) -> Iterator[Fetched | None]:
        """Yield what is fetched of pieces, in their order; None, the last, if interrupted.

        Raises WorkerError if a worker is lost, or hangs.
        """
        waiting: deque[int] = deque()
        turns = itertools.cycle(range(len(self.processes)))
        for worker, piece in zip(turns, pieces, strict=False):
            try:
                _send(self._channels[worker], piece)
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

    def _next(self, worker: int, interrupted: Callable[[], bool]) -> Fetched | None:
        channel, look = self._channels[worker], min(_LOOK, self.timeout or _LOOK)
        channel.settimeout(look)
        # Looks are counted: the time in which this process was stopped itself is not.
        for looks in itertools.count(1):
            try:
                fetched = _receive(channel)
                break
            except TimeoutError:
                if interrupted():
                    return None
                if not self.processes[worker].is_alive():
                    raise self._lost(worker) from None
                if self.timeout and looks * look >= self.timeout:
                    raise WorkerError(
                        f"loader worker {worker} gave no batch for {self.timeout:g} s (loader."
                        f"timeout) at {self._sample(worker)}; raise loader.timeout if it is only "
                        "slow"
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
        code = process.exitcode
        end = f"left with exit code {code}"
        if code is not None and code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        return WorkerError(
            f"loader worker {worker} (pid {process.pid}) {end} at {self._sample(worker)}; {HINT}"
        )

    def _sample(self, worker: int) -> str:
        index = self._watch[worker]
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
    for process in processes:
        process.join()


def _start_failure(error: Exception) -> Exception:
    """Say in words why workers could not be started; what nobody expected stays as it is."""
    if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
        return DataError(
            f"the data set cannot be sent to worker processes ({reason(error)}): make it "
            "picklable, or set loader.num_workers=0 or loader.multiprocessing_context=fork"
        )
    if isinstance(error, OSError):
        return WorkerError(f"the loader's workers cannot be started; {HINT}: {reason(error)}")
    return memory_error(error) or error


def _work(
    channel: socket.socket,
    fetcher: Fetcher,
    worker: int,
    watch: Any,
    init: Callable[[int], object] | None,
) -> None:
    """Fetch pieces until there is None, or the parent is gone."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    torch.set_num_threads(1)
    seed_rng(key(fetcher.seed, LOADER, worker))
    fetcher.watch, fetcher.slot = watch, worker
    parent = os.getppid()
    channel.settimeout(5.0)
    try:
        if init is not None:
            init(worker)
    except Exception as error:
        _send(channel, WorkerError(reason(error)))
        return
    while os.getppid() == parent:
        try:
            piece = _receive(channel)
        except TimeoutError:
            continue
        except (EOFError, ConnectionError):
            return
        if piece is None:
            return
        fetched = fetcher(piece)
        try:
            _send(channel, fetched)
        except ConnectionError:
            return
        except Exception as error:
            failure = memory_error(error) or DataError(
                f"a batch cannot be sent from a worker process ({reason(error)}): let samples hold "
                "tensors and plain values only, or set loader.num_workers=0"
            )
            _send(channel, Fetched(None, fetched.piece, failure=failure))


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
    parts: list[memoryview] = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
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
