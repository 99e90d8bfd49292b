"""Keep a loader's worker processes in hand: their signals, their deaths, their end."""

import atexit
import dataclasses
import errno
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pickle import PicklingError
from types import TracebackType
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data.errors import DataError, WorkerError, reason

# The parent decides when a run ends; a worker that died of a signal to the whole process group
# would take the emergency checkpoint with it.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

_MOMENT = 2.0  # seconds

HINT = (
    "if memory ran out, lower loader.num_workers, loader.prefetch_factor or loader.batch_size; "
    "loader.num_workers=0 shows where the code fails"
)


SHARED_MEMORY = (
    "shared memory (/dev/shm) is full: give it more room (docker run --shm-size, or "
    "mount -o remount,size=2G /dev/shm), lower loader.num_workers, loader.prefetch_factor or "
    "loader.batch_size, or set loader.num_workers=0"
)


def memory_error(error: BaseException) -> WorkerError | None:
    """Say in words how an exception shows that memory gave out; None if it does not.

    Batches travel from workers in files of /dev/shm, which containers often have 64 MB of.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and "</torch_" in text:
        return WorkerError(f"{SHARED_MEMORY}: {reason(error)}")
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return WorkerError(f"out of memory: {reason(error)}")
    return None


class WorkerInit:
    """Ignore the parent's signals in a worker, then run the user's own `worker_init_fn`."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        for number in PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
        sys.excepthook = _quiet_about_the_parent
        # Python would print what keeps a batch from being sent, and the parent wait for ever.
        Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
        if self.then is not None:
            self.then(worker_id)


def _send_failure(queue: Any, error: Exception, item: Any) -> None:
    """Send why a worker's batch could not be sent, in its place; `item` is torch's (number, batch).

    A batch that cannot be pickled is the data set's fault.
    """
    memory = memory_error(error)
    failure = memory or DataError(
        f"a batch cannot be sent from a worker process ({reason(error)}): let samples hold tensors "
        "and plain values only, or set loader.num_workers=0"
    )
    if isinstance(item, tuple) and len(item) == 2 and dataclasses.is_dataclass(item[1]):
        number, fetched = item
        queue.put((number, dataclasses.replace(fetched, batch=None, failure=failure)))
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)


def _quiet_about_the_parent(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception of a worker, unless it is that the parent went away."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


@contextmanager
def shielded_start() -> Iterator[None]:
    """Start workers so that no signal hits one before it ignores them, nor any line of ours later.

    torch installs a SIGCHLD handler that raises wherever the parent happens to be when a worker
    dies, in the middle of a save for instance. Without it a death is found at the next batch.
    """
    in_main = threading.current_thread() is threading.main_thread()
    on_child = signal.getsignal(signal.SIGCHLD) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        if in_main and on_child is not None:
            signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def abandon_start(error: Exception) -> None:
    """End the workers that were started before one could not be; torch forgets them.

    They ignore SIGTERM, so that Python would wait for them as it ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        half_made = frame.f_locals.get("self")
        if isinstance(half_made, _MultiProcessingDataLoaderIter):
            kill(getattr(half_made, "_workers", []))
            half_made._shutdown = True  # or it would try to end them in its own way


def start_failure(error: Exception) -> Exception | None:
    """Say in words why workers could not be started; None for what nobody expected."""
    if isinstance(error, TypeError | AttributeError | PicklingError):
        return DataError(
            f"the data set cannot be sent to worker processes ({reason(error)}): make it "
            "picklable, or set loader.num_workers=0 or loader.multiprocessing_context=fork"
        )
    if isinstance(error, OSError):  # queues and locks are files of /dev/shm, too
        full = error.errno == errno.ENOSPC
        why = SHARED_MEMORY if full else f"the loader's workers cannot be started; {HINT}"
        return WorkerError(f"{why}: {reason(error)}")
    return memory_error(error)


def kill(workers: Sequence[BaseProcess]) -> None:
    """End workers that did not leave by themselves; they ignore anything milder."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join()


@contextmanager
def hurried(workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Give workers a moment to leave by themselves, all together, and kill those that stay.

    torch gives each one 5 s and then a SIGTERM, which it ignores, and 5 s more: an interrupted run
    would use up the time that it is given to end in.
    """

    def end() -> None:
        for worker in workers:
            worker.kill()

    timer = threading.Timer(_MOMENT, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill_at_exit(owner: Any) -> None:
    """Close `owner` when the interpreter ends.

    multiprocessing joins its daemons then, and would wait forever for one that hangs and ignores
    SIGTERM. Handlers run last registered first: this one goes before multiprocessing's.
    """
    reference = weakref.ref(owner)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(owner, atexit.unregister, close)


def worker_exit_message(worker_id: int, worker: BaseProcess, sample: str) -> str:
    """Say how a worker ended and on which sample."""
    code = worker.exitcode
    if code is not None and code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGBUS:  # it wrote where a full tmpfs had no page left
            return (
                f"loader worker {worker_id} (pid {worker.pid}) {end} at {sample}; {SHARED_MEMORY}"
            )
    else:
        end = f"left with exit code {code}"
    return f"loader worker {worker_id} (pid {worker.pid}) {end} at {sample}; {HINT}"
