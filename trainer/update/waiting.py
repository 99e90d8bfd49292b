"""Wait for batches of a loader, until a signal asks for a stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from trainer.state import TrainState
from trainer.update.batch import BatchSource

T = TypeVar("T")


class Waiting:
    """Read streams until a signal asks for a stop.

    The signal's handler raises nothing, as it may interrupt code that loads data. Sources call
    `is_over` between two samples and while they wait for a worker. Only a process that is `alone`
    stops at once: several processes agree at a boundary.
    """

    def __init__(self, state: TrainState, alone: bool) -> None:
        self._state, self._alone = state, alone
        self._active = False

    def is_over(self) -> bool:
        """Return whether a signal ends the current wait; False outside of one."""
        return self._active and self._alone and self._state.signal is not None

    def attend(self, source: BatchSource) -> BatchSource:
        """Connect a source to `is_over`, if it supports that; return it."""
        heed = getattr(source, "heed", None)
        if heed is not None:
            heed(self.is_over)
        return source

    def next(self, stream: Iterator[T]) -> T | None:
        """Return the stream's next item; None at its end, or when a signal ends the wait."""
        self._active = True
        try:
            item = None if self.is_over() else next(stream, None)
            if not self.is_over():
                return item
            self._state.settle()  # a batch that arrived meanwhile is loaded again after the resume
            return None
        finally:
            self._active = False
