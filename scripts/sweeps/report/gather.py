"""Read the jobs of a sweep from its folder, of a grid or a search, complete or not."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from callbacks.support.errors import CallbackError
from conf.errors import ConfigError, Problem
from scripts.sweeps.leaderboard import FILE
from scripts.sweeps.process import NOT_STARTED, Outcome, note_outcome
from scripts.sweeps.ranking import Ranking
from trainer.runs.directory import CONFIG
from trainer.runs.metrics import read_metrics
from trainer.runs.status import STATUS, RunDirectoryError, read_status

LOSSES = ("train/epoch_loss", "val/loss")  # whose curves are drawn beside the objective's
_POINTS = 400  # of a curve, at most

Curve = list[tuple[int, float]]  # steps and values


@dataclass
class Job:
    """A job, its rank in the sweep, and its curves."""

    outcome: Outcome
    rank: int | None = None  # from 1; None for a job without a result
    objective: float | None = None  # at the best step
    step: int | None = None
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        """The overrides of the job."""
        return self.outcome.overrides

    @property
    def height(self) -> float:
        """The objective for a plot; NaN without one."""
        return math.nan if self.objective is None else self.objective


@dataclass
class Found:
    """All jobs of a sweep, the best first."""

    folder: Path
    metric: str
    larger_is_better: bool
    jobs: list[Job]
    unknown: int  # jobs of a search that are not known yet

    @cached_property
    def keys(self) -> list[str]:
        """Return the keys that vary, in the order of the command line."""
        names = dict.fromkeys(key for job in self.jobs for key in job.values)
        return [k for k in names if len({job.values.get(k) for job in self.jobs}) > 1]

    @cached_property
    def others(self) -> list[str]:
        """Return the names of the other results: of validation, test and training."""
        names = {name for job in self.jobs for name in job.outcome.results}
        shown = {n for n in names if n.startswith(("val/", "test/")) or n in LOSSES}
        return sorted(shown - {self.metric}, key=lambda n: (n.split("/")[0] != "test", n))

    @property
    def ended(self) -> list[Job]:
        """Return the jobs that ran to their end and have a result."""
        return [j for j in self.jobs if j.rank is not None and j.outcome.state != "pruned"]

    @property
    def ranked(self) -> list[Job]:
        """Return the jobs that have a result."""
        return [job for job in self.jobs if job.rank is not None]


def gather(folder: Path) -> Found:
    """Read a sweep's folder. Raises ConfigError for one that holds no sweep."""
    metric, outcomes, unknown = _listed(folder)
    ranking = _ranking(folder, outcomes, metric)
    jobs = [_job(outcome, ranking) for outcome in ranking.ranked(outcomes)]
    places = (job for job in jobs if job.objective is not None and not job.outcome.failed)
    for place, job in enumerate(places, start=1):
        job.rank = place
    return Found(folder, ranking.name, ranking.rank_of(1.0) < 0, jobs, unknown)


def _listed(folder: Path) -> tuple[str, list[Outcome], int]:
    """Return the metric, the jobs and the number of unknown ones that the leaderboard lists."""
    try:
        with (folder / FILE).open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        end = header.index("run_dir")
        keys, metric = header[2 : end - 2], header[end - 2]
    except (OSError, ValueError, IndexError) as error:
        message = f"{folder} holds no sweep that can be read: {FILE}: {error}"
        raise ConfigError(Problem("DIR", message, "give the folder that the sweep named")) from None
    outcomes = [
        _outcome(folder, row, dict(zip(keys, row[2 : end - 2], strict=False)))
        for row in rows
        if row and row[0].isdecimal()
    ]
    return metric, outcomes, len(rows) - len(outcomes)


def _outcome(folder: Path, row: Sequence[str], values: dict[str, str]) -> Outcome:
    given = {key: value for key, value in values.items() if value}
    outcome = Outcome(int(row[0]), folder / row[0], given, row[1])
    try:
        status = read_status(outcome.run_dir)
    except RunDirectoryError as error:
        outcome.reason = str(error)
        return outcome
    if status:
        note_outcome(outcome, 0)
        outcome.code, outcome.reason = status.get("code") or 0, status.get("reason") or ""
    elif outcome.state != NOT_STARTED:
        outcome.reason = f"it left no {STATUS}: see its output"
    return outcome


def _ranking(folder: Path, outcomes: Sequence[Outcome], metric: str) -> Ranking:
    """Return how jobs compare, by the configuration of one of them."""
    for outcome in outcomes:
        try:
            config = yaml.safe_load((outcome.run_dir / CONFIG).read_text(encoding="utf-8"))
            ranking = Ranking(config, outcomes, metric)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            continue
        if ranking.name == metric:
            return ranking
    try:
        return Ranking({"callbacks": {}}, outcomes, metric)
    except CallbackError as error:
        raise ConfigError(Problem("DIR", f"{folder}: {error.problems[0].message}")) from error


def _job(outcome: Outcome, ranking: Ranking) -> Job:
    curves = _curves(outcome.run_dir, (ranking.name, *LOSSES))
    objective = ranking.value(outcome)
    course = curves.get(ranking.name, [])
    if objective is None and course:  # not complete: the best value so far
        objective = min((value for _, value in course), key=ranking.rank_of)
        outcome.results = {**outcome.results, ranking.name: objective}
    step = next((step for step, value in course if value == objective), None)
    return Job(outcome, None, objective, step, {k: thinned(c) for k, c in curves.items()})


def _curves(run_dir: Path, names: Sequence[str]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for line in read_metrics(run_dir):
        for name in dict.fromkeys(names if isinstance(line.get("step"), int) else ()):
            value = line.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(name, []).append((line["step"], float(value)))
    return curves


def thinned(curve: Curve) -> Curve:
    """Return at most _POINTS points of a curve, including the last one."""
    stride = -(-len(curve) // _POINTS)
    return curve if stride < 2 else [*curve[:-1:stride], curve[-1]]
