"""Waiting for data: measured, and broken off by a signal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

from trainer.timer import Timer

T = TypeVar("T")


class StopWaiting(BaseException):
    """Raised by a signal handler while data are waited for: no one may swallow it."""

    from_outside = True  # no fault of the data set that it passes through


class Waiting:
    """Draw from streams; `active` tells a signal handler that it may break the wait off."""

    def __init__(self, timer: Timer) -> None:
        self.active = False
        self._timer = timer

    def next(self, stream: Iterator[T], measured: bool = True) -> T | None:
        """Return the stream's next item; None at its end, or when a signal ends the wait."""
        started, self.active = time.monotonic(), True
        try:
            return next(stream, None)
        except StopWaiting:
            return None
        finally:
            self.active = False
            if measured:  # evaluation is a pause in the training that the timer splits
                self._timer.data += time.monotonic() - started
