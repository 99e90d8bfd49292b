"""Keep a loader's worker processes in hand: their signals, their deaths, their end."""

import atexit
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

# The parent decides when a run ends; a worker that died of a signal to the whole process group
# would take the emergency checkpoint with it.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

_MOMENT = 2.0  # seconds

HINT = (
    "if memory ran out, lower loader.num_workers, loader.prefetch_factor or loader.batch_size; "
    "loader.num_workers=0 shows where the code fails"
)


class WorkerInit:
    """Ignore the parent's signals in a worker, then run the user's own `worker_init_fn`."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        for number in PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
        sys.excepthook = _quiet_about_the_parent
        if self.then is not None:
            self.then(worker_id)


def _quiet_about_the_parent(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an exception of a worker, unless it is that the parent went away."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, traceback)


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


def obituary(worker_id: int, worker: BaseProcess, sample: str) -> str:
    """Say how a worker ended and on which sample."""
    code = worker.exitcode
    if code is not None and code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
    else:
        end = f"left with exit code {code}"
    return f"loader worker {worker_id} (pid {worker.pid}) {end} at {sample}; {HINT}"
