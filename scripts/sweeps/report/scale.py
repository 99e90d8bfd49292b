"""The values of a swept key on an axis: linear, logarithmic, or one position for each word."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scripts.sweeps.report.gather import Job

_DECADES = 1.5  # from the smallest to the largest number of a logarithmic axis


@dataclass(frozen=True)
class Scale:
    """The axis of a key."""

    key: str
    words: tuple[str, ...] = ()  # empty: the values are numbers
    log: bool = False

    def place(self, job: Job) -> float | None:
        """Return the position of a job's value; None if it has none."""
        value = job.values.get(self.key)
        if value is None:
            return None
        return float(self.words.index(value)) if self.words else float(value)


def scale_of(key: str, jobs: Iterable[Job]) -> Scale:
    """Return the scale of a key: words if any value is not a number."""
    values = [job.values[key] for job in jobs if key in job.values]
    numbers = [n for value in values if (n := _number(value)) is not None]
    if len(numbers) < len(values):
        return Scale(key, words=tuple(sorted(set(values))))
    positive = min(numbers, default=0.0) > 0
    return Scale(key, log=positive and max(numbers) / min(numbers) > 10**_DECADES)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def placed(jobs: Iterable[Job], scale: Scale) -> list[tuple[float, Job]]:
    """Return the jobs that have a value of the key, with their positions."""
    return [(place, job) for job in jobs if (place := scale.place(job)) is not None]


def fractions(places: Mapping[int, float], log: bool) -> dict[int, float]:
    """Return positions from 0 (the lowest) to 1 (the highest)."""
    moved = {n: math.log(value) if log else value for n, value in places.items()}
    low, high = min(moved.values(), default=0.0), max(moved.values(), default=1.0)
    return {n: (value - low) / (high - low) if high > low else 0.5 for n, value in moved.items()}
