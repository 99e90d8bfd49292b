"""Signals: before there is anything to save they end the command, a run they end after its update.

A second Ctrl-C ends a run at once. Handlers act in the process that has set them alone: one that is
forked, as a user's `multiprocessing.Pool` does, has those that it would have without us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from regimen.trainer.errors import EXIT_CODES, leave_at_once, stopping_signals

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

_PR_SET_PDEATHSIG = 1
_early: list[int] = []
Handler = Callable[[int, FrameType | None], object]
_replaced: dict[Any, dict[int, Any]] = {}  # by handler of ours: those that it stands for, by signal


class StoppedEarlyError(BaseException):
    """A signal arrived before there was anything to save."""

    from_outside = True  # not an error of the code that it interrupts

    def __init__(self, number: int) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: there was nothing to save")


def end_on_signals() -> None:
    """End the command on a signal, as long as there is nothing to save."""

    def stop_early(number: int, frame: FrameType | None) -> None:
        _early.append(number)
        raise StoppedEarlyError(number)

    _set(stop_early)


def _set(handle: Handler) -> dict[int, Any]:
    if not _replaced:
        os.register_at_fork(after_in_child=_give_back)
    _replaced[handle] = {n: signal.signal(n, handle) for n in stopping_signals()}
    return dict(_replaced[handle])


def _give_back() -> None:
    # `Pool.terminate()` waits for children that it has sent SIGTERM: a handler that notes a signal,
    # or raises what only our commands catch, would keep them alive.
    for number in EXIT_CODES:
        ours = handler = signal.getsignal(number)
        while handler in _replaced:
            handler = _replaced[handler][number]
        if handler is not ours:
            signal.signal(number, handler)


def end_with_parent(number: int) -> None:
    """Ask Linux for a signal when the parent process dies; other systems send none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def handling(handle: Handler) -> Iterator[dict[int, Any]]:
    """Have `handle` called for signals within the context; yields the handlers from then on."""
    previous = _set(handle)
    try:
        yield previous
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals(trainer: Trainer) -> Iterator[None]:
    """Turn signals into requests to stop within the context; main thread only.

    The handler sets a flag and raises nothing: it may interrupt any code, such as a user's
    `except:` or a swap of random states. Code that waits polls the flag. A signal that arrived
    before, and whose exception was swallowed, counts.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if number == signal.SIGINT and trainer.state.signal:
            if trainer.is_main:
                leave_after_second_interrupt()
            leave_at_once(code)
        trainer.state.signal = trainer.state.signal or (signal.Signals(number).name, code)
        trainer.group.on_signal()

    with handling(handle) as previous:
        if _early:
            handle(_early[-1], None)
        try:
            yield
        except BaseException:
            if trainer.group.world_size > 1:
                # A launcher stops the peers of a failed process: this one already ends.
                previous |= dict.fromkeys(previous, signal.SIG_IGN)
            raise


def leave_after_second_interrupt() -> NoReturn:
    """Say so and end this process; what is on disk is whole at every moment."""
    way_out = "resume=auto goes on from the last checkpoint"
    line = f"error: ended at once by a second Ctrl-C, nothing more was saved; {way_out}\n"
    bar = "\n" if os.isatty(2) else ""  # a progress bar may stand in the line
    with suppress(OSError):  # past Python's stream, whose lock the interrupted code may hold
        os.write(2, f"{bar}{line}".encode())
    leave_at_once(EXIT_CODES[signal.SIGINT])
