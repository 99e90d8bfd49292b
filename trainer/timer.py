"""Where the time of a run goes, by the host's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Kind = Literal["data", "forward + backward", "optimizer", "evaluation", "checkpoints", "callbacks"]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
_PAUSES: tuple[Kind, ...] = ("evaluation", "checkpoints")  # of training


class Timer:
    """Split the seconds of a run by kind: each moment counts once.

    Nothing is synchronized for it: what a GPU computes counts where the host waits for it.
    """

    def __init__(self) -> None:
        self.spent: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._kind: Kind = "callbacks"  # of what no `lap` claims
        self.start()

    def start(self) -> None:
        """Begin: the time before does not count."""
        self._last = perf_counter()
        self.reset()

    def lap(self, kind: Kind) -> None:
        """Count the time since the last call for `kind`."""
        now = perf_counter()
        self.spent[kind] += now - self._last
        self._last = now

    @contextmanager
    def spending(self, kind: Kind) -> Iterator[None]:
        """Count the time of a context for `kind`, but for contexts of other kinds within."""
        outer = self._kind
        self.lap(outer)
        self._kind = kind
        try:
            yield
        finally:
            self.lap(kind)
            self._kind = outer

    def reset(self) -> None:
        """Begin an interval, of which `total` and `data` tell."""
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
