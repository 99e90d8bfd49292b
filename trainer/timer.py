"""The time that a run spends on each kind of work, by the host's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Kind = Literal[
    "data",
    "forward + backward",
    "optimizer",
    "evaluation",
    "checkpoints",
    "callbacks",
    "start and end",
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
_PAUSES: tuple[Kind, ...] = ("evaluation", "checkpoints", "start and end")  # no training


class Timer:
    """Attribute each second of a run to one kind of work.

    The device is not synchronized: the time of a GPU is counted where the host waits for it.
    """

    def __init__(self) -> None:
        self.spent: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._kind: Kind = "callbacks"  # of the time that no `lap` counts
        self.start()

    def start(self) -> None:
        """Start the clock; earlier time is not counted."""
        self._last = perf_counter()
        self.reset()

    def lap(self, kind: Kind) -> None:
        """Add the time since the last call to `kind`."""
        now = perf_counter()
        self.spent[kind] += now - self._last
        self._last = now

    @contextmanager
    def spending(self, kind: Kind) -> Iterator[None]:
        """Add the time of the context to `kind`, except that of nested contexts."""
        outer = self._kind
        self.lap(outer)
        self._kind = kind
        try:
            yield
        finally:
            self.lap(kind)
            self._kind = outer

    def reset(self) -> None:
        """Begin a new interval for `total` and `data`."""
        self._before = dict(self.spent)

    @property
    def seconds(self) -> float:
        """Seconds since `start`."""
        self.lap(self._kind)
        return sum(self.spent.values())

    @property
    def total(self) -> float:
        """Seconds of training in the interval, waiting for data included."""
        self.lap(self._kind)
        return sum(self.spent[k] - self._before[k] for k in KINDS if k not in _PAUSES)

    @property
    def data(self) -> float:
        """Seconds of the interval spent waiting for the next batch."""
        return self.spent["data"] - self._before["data"]
