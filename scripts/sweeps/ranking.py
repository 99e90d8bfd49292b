"""Which job of a sweep is the best."""

from collections.abc import Sequence
from typing import Any

from callbacks.support.monitor import AUTO, Monitor
from scripts.sweeps.process import NOT_STARTED, Outcome
from trainer.metric_names import epoch_metric

_BEST = "best/"


class Ranking:
    """Compare jobs by the metric that their checkpoints are chosen by.

    `metric`: that of the task, if it is known before a job has run. `expected`: the same as long as
    no job has a result, which says what its checkpoints were chosen by.
    """

    def __init__(
        self,
        config: dict[str, Any],
        jobs: Sequence[Outcome],
        metric: str | None = None,
        expected: str | None = None,
    ) -> None:
        nodes = [node for node in config["callbacks"].values() if node]
        modes = {
            epoch_metric(node["monitor"]): node.get("mode", AUTO)
            for node in nodes
            if node.get("monitor") not in (None, AUTO)  # there the task decides
        }
        best = (k.removeprefix(_BEST) for job in jobs for k in job.results if k.startswith(_BEST))
        known = next(reversed(modes), metric or expected or "val/loss")
        name = known if metric else next(best, None) or known
        self._monitor = Monitor(name, modes.get(name, AUTO))
        self.name = str(self._monitor.name)

    def value(self, job: Outcome) -> float | None:
        """Return a job's best value, or its last where the best was not recorded."""
        found = job.results.get(_BEST + self.name, job.results.get(self.name))
        return found if isinstance(found, int | float) else None

    def rank(self, job: Outcome) -> float | None:
        """Return a number that is smaller for a better job; None for one without a value."""
        value = self.value(job)
        return None if value is None else self.rank_of(value)

    def rank_of(self, value: float) -> float:
        """Return a number that is smaller for a better value."""
        return self._monitor.rank(value)

    def ranked(self, jobs: Sequence[Outcome]) -> list[Outcome]:
        """Return jobs from the best to the worst; then those that failed, then the rest.

        The pruned, which were trained less, come behind those that ran to their end.
        """

        def place(job: Outcome) -> tuple[bool, bool, bool, bool, float, int]:
            rank = self.rank(job)
            waits, short = job.state == NOT_STARTED, job.state == "pruned"
            return waits, job.failed, rank is None, short, rank or 0.0, job.number

        return sorted(jobs, key=place)
