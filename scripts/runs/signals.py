"""Signals, SIGHUP included, end a run after its update; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from trainer.errors import EXIT_CODES, leave_at_once, stopping_signals
from trainer.trainer import Trainer


def leave_after_second_interrupt() -> NoReturn:
    """Say so and end this process; what is on disk is whole at every moment."""
    way_out = "resume=auto goes on from the last checkpoint"
    line = f"error: ended at once by a second Ctrl-C, nothing more was saved; {way_out}\n"
    bar = "\n" if os.isatty(2) else ""  # a progress bar may stand in the line
    with suppress(OSError):  # past Python's stream, whose lock the interrupted code may hold
        os.write(2, f"{bar}{line}".encode())
    leave_at_once(EXIT_CODES[signal.SIGINT])


@contextmanager
def stop_signals(trainer: Trainer, heard: int | None = None) -> Iterator[None]:
    """Turn signals into requests to stop within the context; main thread only.

    The handler sets a flag and raises nothing: it may interrupt any code, such as a user's
    `except:` or a swap of random states. Code that waits polls the flag. `heard`: a signal that
    arrived before.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if number == signal.SIGINT and trainer.state.signal:
            if trainer.is_main:
                leave_after_second_interrupt()
            leave_at_once(code)
        trainer.state.signal = trainer.state.signal or (signal.Signals(number).name, code)
        trainer.group.on_signal()

    previous: dict[int, Any] = {n: signal.signal(n, handle) for n in stopping_signals()}
    if heard is not None:
        handle(heard, None)
    try:
        yield
    except BaseException:
        if trainer.group.world_size > 1:
            # A launcher stops the peers of a failed process: this one already ends.
            previous = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
