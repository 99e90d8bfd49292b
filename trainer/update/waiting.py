"""Draw from the loaders, until a signal asks for a stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from trainer.state import TrainState
from trainer.update.batch import BatchSource

T = TypeVar("T")


class Waiting:
    """Draw from streams until a signal asks for a stop.

    Its handler raises nothing, or it would do so in the middle of whatever loads the data: sources
    ask `is_over` between two samples and while they wait for a worker. Only a process that is
    `alone` breaks off: several agree at a boundary.
    """

    def __init__(self, state: TrainState, alone: bool) -> None:
        self._state, self._alone = state, alone
        self._active = False

    def is_over(self) -> bool:
        """Return whether a signal ends the wait that is under way; false while there is none."""
        return self._active and self._alone and self._state.signal is not None

    def attend(self, source: BatchSource) -> BatchSource:
        """Let a source ask, if it can, whether its wait is over; return it."""
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
            self._state.settle()  # what has come meanwhile is drawn again by the run that goes on
            return None
        finally:
            self._active = False
