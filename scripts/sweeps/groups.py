"""Jobs that differ in chosen keys only, such as the seed: mean and deviation of their results."""

import statistics
from collections.abc import Callable, Sequence

from conf.errors import Problem, did_you_mean, raise_problems
from scripts.sweeps.process import Outcome
from scripts.sweeps.ranking import Ranking


class Groups:
    """The results of jobs, by all their overrides but those of `keys`; failed jobs have none."""

    def __init__(self, keys: Sequence[str], jobs: Sequence[Outcome], ranking: Ranking) -> None:
        self.keys = keys
        self.header = ("mean", "std", "n") if keys else ()
        self._ranking = ranking
        self._first: dict[tuple[tuple[str, str], ...], Outcome] = {}
        self._values: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for job in jobs:
            self._first.setdefault(self._name(job), job)
            values = self._values.setdefault(self._name(job), [])
            value = None if job.failed else ranking.value(job)
            if value is not None:
                values.append(value)

    def cells(self, job: Outcome, shown: Callable[[float], str]) -> list[str]:
        """Return mean, standard deviation (of the sample) and number of a job's group."""
        if not self.keys:
            return []
        values = self._values[self._name(job)]
        mean = shown(statistics.fmean(values)) if values else ""
        deviation = shown(statistics.stdev(values)) if len(values) > 1 else ""
        return [mean, deviation, str(len(values))]

    def best_first(self) -> list[Outcome]:
        """Return one job of each group, that of the best mean first."""

        def place(job: Outcome) -> tuple[bool, float]:
            values = self._values[self._name(job)]
            return not values, self._ranking.rank_of(statistics.fmean(values)) if values else 0.0

        return sorted(self._first.values(), key=place)

    def _name(self, job: Outcome) -> tuple[tuple[str, str], ...]:
        return tuple((k, value) for k, value in job.overrides.items() if k not in self.keys)


def group_keys(group_by: str | list[str] | None, varied: Sequence[str]) -> list[str]:
    """Return the keys of `sweep.group_by`; raises ConfigError for those that do not vary."""
    keys = [group_by] if isinstance(group_by, str) else group_by or []
    there = f"there are {', '.join(varied)}" if varied else None
    raise_problems(
        Problem(
            "sweep.group_by",
            f"{key!r} does not vary between the jobs",
            did_you_mean(key, varied) or there,
        )
        for key in keys
        if key not in varied
    )
    return keys
