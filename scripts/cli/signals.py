"""Signals of a command: before there is anything to save they end it.

Handlers act only in the process that has set them. A process that it forks, as a user's
`multiprocessing.Pool` does, gets back the handlers that it would have without Regimen.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from regimen.trainer.errors import EXIT_CODES, leave_at_once, stopping_signals

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
Handler = Callable[[int, FrameType | None], object]
_previous: dict[Any, dict[int, Any]] = {}  # by handler of ours: those it replaced, by signal
early_signals: list[int] = []  # that arrived before there was anything to save


class StoppedEarlyError(BaseException):
    """A signal arrived before there was anything to save."""

    from_outside = True  # not an error of the code that it interrupts

    def __init__(self, number: int) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: there was nothing to save")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; of a real-time signal its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_on_signals() -> None:
    """End the command on a signal, as long as there is nothing to save."""

    def stop_early(number: int, frame: FrameType | None) -> None:
        early_signals.append(number)
        raise StoppedEarlyError(number)

    _set(stop_early)


def _set(handle: Handler) -> dict[int, Any]:
    """Set a handler for all signals that stop a command; return those that it replaces."""
    if not _previous:
        os.register_at_fork(after_in_child=_restore_in_child)
    _previous[handle] = {n: signal.signal(n, handle) for n in stopping_signals()}
    return dict(_previous[handle])


def _restore_in_child() -> None:
    # `Pool.terminate()` sends SIGTERM and waits for its children. A handler that only records the
    # signal, or raises what only our commands catch, would keep them alive.
    for number in EXIT_CODES:
        handler = current = signal.getsignal(number)
        while handler in _previous:
            handler = _previous[handler][number]
        if handler is not current:
            signal.signal(number, handler)


def end_with_parent(number: int) -> None:
    """Ask Linux for a signal when the parent process dies; other systems send none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def handling(handle: Handler) -> Iterator[dict[int, Any]]:
    """Call `handle` for signals within the context; yield the handlers to restore at its end."""
    restored = _set(handle)
    try:
        yield restored
    finally:
        for number, handler in restored.items():
            signal.signal(number, handler)


def leave_after_second_interrupt() -> NoReturn:
    """Print why, and end this process at once; files on disk are whole at every moment."""
    hint = "resume=auto goes on from the last checkpoint"
    line = f"error: ended at once by a second Ctrl-C, nothing more was saved; {hint}\n"
    if os.isatty(2):  # a progress bar may stand in the line
        line = "\n" + line
    # Past Python's stream, whose lock the interrupted code may hold.
    with suppress(OSError):
        os.write(2, line.encode())
    leave_at_once(EXIT_CODES[signal.SIGINT])
