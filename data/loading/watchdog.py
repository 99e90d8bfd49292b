"""End workers that hang where torch's loader waits for them without a timeout."""

import threading
import weakref
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

_LOOK = 1.0  # seconds


class Watchdog:
    """Kill workers if a single look for their batch, `with watchdog:`, takes too long.

    torch looks for a batch with a timeout, but receives one without: the worker hands its memory
    over, which it never does if it is stopped, or holds Python's lock for ever.

    seconds: of this process, without the time in which it was stopped itself; 0 = without end.
    """

    def __init__(self, seconds: float, workers: Sequence[BaseProcess]) -> None:
        self.has_bitten = False
        self._seconds, self._workers = seconds, workers
        self._moves = 0  # into a look and out of it: odd within one
        self._seen, self._looks = 0, 0  # the moves at the last look of the thread, and how often
        self._ended = threading.Event()
        if seconds and workers:
            arguments = weakref.ref(self), self._ended
            threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def __enter__(self) -> None:
        self._moves += 1

    def __exit__(self, *error: object) -> None:
        self._moves += 1

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def look(self) -> None:
        """Count how often the same wait was seen; kill the workers if that was too often."""
        moves = self._moves
        self._looks = self._looks + 1 if moves % 2 and moves == self._seen else 0
        self._seen = moves
        if self._looks * _LOOK > self._seconds and not self.has_bitten:
            self.has_bitten = True
            for worker in self._workers:
                worker.kill()


def _watch(reference: weakref.ref[Watchdog], ended: threading.Event) -> None:
    while not ended.wait(_LOOK):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.look()
        del watchdog  # its owner may forget it meanwhile
