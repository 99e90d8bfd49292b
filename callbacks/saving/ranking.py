"""Which saved checkpoints are the best, by values that belong to the very update that is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from callbacks.support.monitor import Monitor


class Saved(NamedTuple):
    """A checkpoint and its value of the monitored metric."""

    step: int
    value: float


class Logged:
    """The values that were logged since the last update."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._updates = -1

    def add(self, updates: int, scalars: Mapping[str, float]) -> None:
        """Add values that were logged after so many updates; `best/<metric>` is none of them."""
        if self._updates != updates:
            self._updates, self._values = updates, {}
        self._values |= {k: v for k, v in scalars.items() if not k.startswith("best/")}

    def after(self, updates: int) -> dict[str, float]:
        """Return the values that were logged after so many updates."""
        return dict(self._values) if self._updates == updates else {}


def ranking_with(
    before: Iterable[Saved], step: int, values: Mapping[str, float], monitor: Monitor, most: int
) -> list[Saved]:
    """Return a ranking, the best first, with the checkpoint of `step` in it.

    Without a metric the newest is the best. `most`: to keep (-1: one, as all are kept anyway).
    """
    known = {saved.step: saved.value for saved in before}
    value = values.get(monitor.name, math.nan) if monitor.name else float(step)
    if not math.isnan(value):
        known[step] = value
    best = [Saved(*entry) for entry in monitor.best_first(known)]
    return best[: max(most, 1)] if most else []


def from_state(state: Iterable[Sequence[Any]]) -> list[Saved]:
    """Return a ranking from the plain values that a checkpoint holds."""
    return [Saved(int(step), float(value)) for step, value in state]
