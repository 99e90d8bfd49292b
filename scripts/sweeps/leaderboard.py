"""The jobs of a sweep and how they ended: ranked, as a table and as `leaderboard.csv`."""

import csv
import io
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from callbacks.support.monitor import AUTO, Monitor
from trainer.files.atomic import write_text
from trainer.files.layout import aligned
from trainer.files.log_format import on_one_line
from trainer.metric_names import epoch_metric
from trainer.runs.status import ENDED_WELL, RunDirectoryError, read_status

FILE = "leaderboard.csv"
NOT_STARTED = "not started"
SHOWN = 20  # jobs of the table on the screen
_BEST = "best/"


@dataclass(slots=True)
class Job:
    """A job of a sweep, known by its overrides, and how it ended."""

    number: int  # the name of its folder
    run_dir: Path
    overrides: dict[str, str]  # the values of keys that affect what it trains
    texts: list[str] = field(default_factory=list)  # all its overrides, as on a command line
    config: dict[str, Any] = field(default_factory=dict)  # {} where it is not known
    more: list[str] = field(default_factory=list)  # overrides that do not affect what it trains
    state: str = NOT_STARTED
    code: int = 0
    reason: str = ""
    seconds: float | None = None
    results: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Return whether the job ran and did not end well."""
        return self.state not in (*ENDED_WELL, "stopped", NOT_STARTED)

    @property
    def output(self) -> Path:
        """Return the file of what it prints."""
        return self.run_dir.parent / "output" / f"{self.number}.txt"

    def end(self, code: int, errors: Sequence[str] = ()) -> None:
        """Note the end of its process: its code (-N: killed by signal N) and its `error:` lines."""
        try:
            status: dict[str, Any] = read_status(self.run_dir)
        except RunDirectoryError:
            status = {}
        state = str(status.get("state") or ("failed" if code else "finished"))
        self.state = "failed" if code and state in (*ENDED_WELL, "running") else state
        self.code = 128 - code if code < 0 else code
        self.seconds, self.results = status.get("seconds"), status.get("results") or {}
        self.reason = ""
        if code > 0:
            self.reason = str(status.get("reason") or (errors[-1] if errors else ""))
        elif code < 0:
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            command = status.get("resume")
            way_out = f"; go on with: {command}" if command else ""
            self.reason = f"killed by {signal.Signals(-code).name}{memory}{way_out}"


class Ranking:
    """Compare jobs by the metric that their checkpoints are chosen by.

    The configuration names it, else the results do, else it is the one `expected` of the task. With
    `decided` results have no say: a search compares by the metric of its study.
    """

    def __init__(
        self,
        config: dict[str, Any],
        jobs: Sequence[Job],
        expected: str | None = None,
        decided: bool = False,
    ) -> None:
        nodes = [node for node in config["callbacks"].values() if node]
        modes = {
            epoch_metric(node["monitor"]): node.get("mode", AUTO)
            for node in nodes
            if node.get("monitor") not in (None, AUTO)  # there the task decides
        }
        known = next(reversed(modes), expected or "val/loss")
        best = (k.removeprefix(_BEST) for job in jobs for k in job.results if k.startswith(_BEST))
        name = known if decided else next(best, None) or known
        self._monitor = Monitor(name, modes.get(name, AUTO))
        self.name = str(self._monitor.name)
        self.larger_is_better = self.rank_of(1.0) < 0

    def value(self, job: Job) -> float | None:
        """Return a job's best value, or its last where the best was not recorded."""
        found = job.results.get(_BEST + self.name, job.results.get(self.name))
        return found if isinstance(found, int | float) else None

    def rank_of(self, value: float) -> float:
        """Return a number that is smaller for a better value."""
        return self._monitor.rank(value)

    def ranked(self, jobs: Sequence[Job]) -> list[Job]:
        """Return jobs from the best to the worst; then those that failed, then the rest.

        The pruned, which were trained less, come behind those that ran to their end.
        """

        def place(job: Job) -> tuple[bool, bool, bool, bool, float, int]:
            value = self.value(job)
            rank = 0.0 if value is None else self.rank_of(value)
            waits, short = job.state == NOT_STARTED, job.state == "pruned"
            return waits, job.failed, value is None, short, rank, job.number

        return sorted(jobs, key=place)


class Groups:
    """The results of jobs that differ in the keys of `sweep.group_by` only; failed: none."""

    def __init__(self, keys: Sequence[str], jobs: Sequence[Job], ranking: Ranking) -> None:
        self.keys = keys
        self.header = ("mean", "std", "n") if keys else ()
        self._ranking = ranking
        self._jobs: dict[tuple[tuple[str, str], ...], list[Job]] = {}
        for job in jobs:
            self._jobs.setdefault(self._name(job), []).append(job)

    def cells(self, job: Job, shown: Callable[[float], str]) -> list[str]:
        """Return mean, standard deviation (of the sample) and number of a job's group."""
        if not self.keys:
            return []
        values = self._values(job)
        mean = shown(statistics.fmean(values)) if values else ""
        deviation = shown(statistics.stdev(values)) if len(values) > 1 else ""
        return [mean, deviation, str(len(values))]

    def best_first(self) -> list[Job]:
        """Return one job of each group, that of the best mean first."""

        def place(job: Job) -> tuple[bool, float]:
            values = self._values(job)
            return not values, self._ranking.rank_of(statistics.fmean(values)) if values else 0.0

        return sorted((jobs[0] for jobs in self._jobs.values()), key=place)

    def _values(self, job: Job) -> list[float]:
        results = (self._ranking.value(j) for j in self._jobs[self._name(job)] if not j.failed)
        return [value for value in results if value is not None]

    def _name(self, job: Job) -> tuple[tuple[str, str], ...]:
        return tuple((k, value) for k, value in job.overrides.items() if k not in self.keys)


def write_csv(
    folder: Path,
    jobs: Sequence[Job],
    ranking: Ranking,
    groups: Groups,
    count: int,
    running: Collection[int] = (),
) -> None:
    """Write all jobs, ranked, with every override that was given and the statistics of its group.

    A search knows its next jobs one by one: those missing of `count` are listed without numbers.
    `running`: the numbers of the jobs that run now. Raises StorageError.
    """
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    header = ["job", "status", *keys, ranking.name, "seconds", "run_dir", *groups.header]
    rows = [header]
    for job in ranking.ranked(jobs):
        value = ranking.value(job)
        state = "running" if job.number in running else job.state
        overrides = [job.overrides.get(key, "") for key in keys]
        facts = ["" if value is None else repr(value), _seconds(job), str(job.run_dir)]
        rows.append([str(job.number), state, *overrides, *facts, *groups.cells(job, repr)])
    rows += [["", NOT_STARTED, *[""] * (len(header) - 2)]] * (count - len(jobs))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(folder / FILE, text.getvalue())


def read_states(folder: Path) -> Iterator[str]:
    """Yield the states of a leaderboard's jobs. Raises OSError, ValueError."""
    with (folder / FILE).open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    yield from (row[1] for row in rows if len(row) > 1)


def show(
    folder: Path, jobs: Sequence[Job], ranking: Ranking, groups: Groups, varied: Sequence[str]
) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    print(f"\n{on_one_line(f'sweep {folder}')}")
    ranked = ranking.ranked(jobs)
    rows = [["job", "status", *short_keys(varied), ranking.name, "seconds"]]
    for job in ranked[:SHOWN]:
        value = ranking.value(job)
        facts = ["" if value is None else f"{value:.4f}", _seconds(job)]
        overrides = [job.overrides.get(key, "") for key in varied]
        rows.append([str(job.number), job.state, *overrides, *facts])
    _print_table(rows)
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    if groups.keys:
        print(f"\n{ranking.name} over {', '.join(groups.keys)}")
        shared = [key for key in varied if key not in groups.keys]
        rows = [[*short_keys(shared), *groups.header]]
        for job in groups.best_first()[:SHOWN]:
            cells = groups.cells(job, lambda value: f"{value:.4f}")
            rows.append([*(job.overrides.get(key, "") for key in shared), *cells])
        _print_table(rows)
    ended = [job for job in jobs if job.state in ENDED_WELL]
    if ended and all(ranking.value(job) is None for job in jobs):
        print(f"no job has logged {ranking.name}: they are not ranked")
    for job in jobs:
        if job.failed:
            reason = on_one_line(job.reason or f"see {job.output}")
            print(f"job {job.number} {job.state} (exit {job.code}): {reason}")
    print(on_one_line(f"leaderboard: {folder / FILE}"))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    cells = [[on_one_line(cell) for cell in row] for row in rows]
    for line in aligned(cells, get_terminal_size().columns, last=2):
        print(line)


def _seconds(job: Job) -> str:
    return "" if job.seconds is None else f"{job.seconds:.1f}"


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest end of each dotted key that no other of them has."""

    def ends(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]

    known = Counter(end for key in keys for end in ends(key))
    return [next((end for end in ends(key) if known[end] == 1), key) for key in keys]
