"""SIGTERM, SIGUSR1 and Ctrl-C end a run after its update; a second Ctrl-C ends it at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainer.trainer import Trainer
from trainer.waiting import StopWaiting

# SIGUSR1 is what batch systems send ahead of a preemption: it counts as SIGTERM.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


@contextmanager
def stop_signals(trainer: Trainer) -> Iterator[None]:
    """Turn signals into requests to stop while the context lasts; main thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if number == signal.SIGINT and trainer.state.signal:
            leave_at_once(code)
        trainer.state.signal = trainer.state.signal or (signal.Signals(number).name, code)
        trainer.strategy.on_signal()
        # Several processes agree at a boundary; one alone need not wait for a slow loader.
        if trainer.waiting.active and trainer.strategy.world_size == 1:
            trainer.state.settle()
            raise StopWaiting

    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in EXIT_CODES}
    try:
        yield
    except BaseException:
        if trainer.strategy.world_size > 1:
            # A launcher tells a process to stop whose peer has failed: it is about to.
            previous = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_at_once(code: int) -> None:
    """End this process and its workers now: what is on disk is whole at every moment."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
