"""The jobs of a sweep and how they ended: ranked, as a table and as `leaderboard.csv`."""

import csv
import io
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from callbacks.support import AUTO, Monitor
from trainer.files.atomic import write_text
from trainer.files.layout import aligned, on_one_line
from trainer.runs.status import ENDED_WELL, RunDirectoryError, read_status
from trainer.state import epoch_metric

FILE = "leaderboard.csv"
NOT_STARTED = "not started"
SHOWN = 20  # jobs of the table on the screen
_BEST = "best/"
_STATISTICS = ("mean", "std", "n")  # of a group


@dataclass(slots=True)
class Job:
    """A job of a sweep, known by its overrides, and how it ended."""

    number: int  # the name of its folder
    run_dir: Path
    overrides: dict[str, str]  # the values of keys that affect what it trains
    texts: list[str] = field(default_factory=list)  # all its overrides, as on a command line
    config: dict[str, Any] = field(default_factory=dict)  # {} where it is not known
    more: list[str] = field(default_factory=list)  # overrides that do not affect what it trains
    starts: int = 0
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

    def end(self, code: int) -> None:
        """Note the end of its process by its code; -N: killed by signal N."""
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
            self.reason = str(status.get("reason") or self._last_error())
        elif code < 0:
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            command = status.get("resume")
            way_out = f"; go on with: {command}" if command else ""
            self.reason = f"killed by {signal.Signals(-code).name}{memory}{way_out}"

    def _last_error(self) -> str:
        try:
            lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        told = [line for line in lines if line.startswith("error: ")]
        return told[-1].removeprefix("error: ").strip() if told else ""


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
        self.jobs = jobs
        modes = {
            epoch_metric(node["monitor"]): node.get("mode", AUTO)
            for node in config["callbacks"].values()
            if node and node.get("monitor") not in (None, AUTO)  # there the task decides
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

    def ranked(self) -> list[Job]:
        """Return the jobs from the best to the worst; then those that failed, then the rest.

        The pruned, which were trained less, come behind those that ran to their end.
        """

        def place(job: Job) -> tuple[bool, bool, bool, bool, float, int]:
            value = self.value(job)
            rank = 0.0 if value is None else self.rank_of(value)
            waits, short = job.state == NOT_STARTED, job.state == "pruned"
            return waits, job.failed, value is None, short, rank, job.number

        return sorted(self.jobs, key=place)

    def compared(self) -> list[Job]:
        """Return the jobs that have a result, the best first."""
        return [job for job in self.ranked() if not job.failed and self.value(job) is not None]

    def groups(self, keys: Sequence[str]) -> dict[tuple[tuple[str, str], ...], list[float]]:
        """Return the results of jobs that differ in `keys` only, by what they share; failed: none.

        The group with the best mean comes first.
        """
        found: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for job in self.jobs:
            values = found.setdefault(_shared(job, keys), [])
            if not job.failed and (value := self.value(job)) is not None:
                values.append(value)

        def place(name: tuple[tuple[str, str], ...]) -> tuple[bool, float]:
            values = found[name]
            return not values, self.rank_of(statistics.fmean(values)) if values else 0.0

        return {name: found[name] for name in sorted(found, key=place)}


def _shared(job: Job, keys: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in job.overrides.items() if key not in keys)


def _statistics(values: Sequence[float], shown: Callable[[float], str]) -> list[str]:
    mean = shown(statistics.fmean(values)) if values else ""
    deviation = shown(statistics.stdev(values)) if len(values) > 1 else ""
    return [mean, deviation, str(len(values))]


def write_csv(
    folder: Path,
    ranking: Ranking,
    group_by: Sequence[str],
    count: int,
    running: Collection[int] = (),
) -> None:
    """Write all jobs, ranked, with every override that was given and the statistics of its group.

    A search knows its next jobs one by one: those missing of `count` are listed without numbers.
    `running`: the numbers of the jobs that run now. Raises StorageError.
    """
    keys = list(dict.fromkeys(key for job in ranking.jobs for key in job.overrides))
    groups = ranking.groups(group_by) if group_by else {}
    header = ["job", "status", *keys, ranking.name, "seconds", "run_dir"]
    header += _STATISTICS if group_by else ()
    rows = [header]
    for job in ranking.ranked():
        value = ranking.value(job)
        row = [str(job.number), "running" if job.number in running else job.state]
        row += [job.overrides.get(key, "") for key in keys]
        row += ["" if value is None else repr(value), _seconds(job), str(job.run_dir)]
        rows.append(row + (_statistics(groups[_shared(job, group_by)], repr) if groups else []))
    rows += [["", NOT_STARTED, *[""] * (len(header) - 2)]] * (count - len(ranking.jobs))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(folder / FILE, text.getvalue())


def read_states(folder: Path) -> Iterator[str]:
    """Yield the states of a leaderboard's jobs. Raises OSError, ValueError."""
    with (folder / FILE).open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    yield from (row[1] for row in rows if len(row) > 1)


def show(folder: Path, ranking: Ranking, group_by: Sequence[str], varied: Sequence[str]) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    print(f"\n{on_one_line(f'sweep {folder}')}")
    ranked = ranking.ranked()
    facts = []
    for job in ranked[:SHOWN]:
        value = ranking.value(job)
        ends = ["" if value is None else f"{value:.4f}", _seconds(job)]
        facts.append(([str(job.number), job.state], job.overrides, ends))
    _print_table(["job", "status"], varied, [ranking.name, "seconds"], facts)
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    if group_by:
        print(f"\n{ranking.name} over {', '.join(group_by)}")
        shared = [key for key in varied if key not in group_by]
        best = list(ranking.groups(group_by).items())[:SHOWN]
        rows = [("", dict(name), _statistics(values, "{:.4f}".format)) for name, values in best]
        _print_table([], shared, _STATISTICS, rows)
    if any(j.state in ENDED_WELL for j in ranked) and all(ranking.value(j) is None for j in ranked):
        print(f"no job has logged {ranking.name}: they are not ranked")
    for job in ranking.jobs:
        if job.failed:
            reason = on_one_line(job.reason or f"see {job.output}")
            print(f"job {job.number} {job.state} (exit {job.code}): {reason}")
    print(on_one_line(f"leaderboard: {folder / FILE}"))


def _print_table(
    first: Sequence[str],
    keys: Sequence[str],
    last: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Mapping[str, str], Sequence[str]]],
) -> None:
    table = [[*first, *short_keys(keys), *last]]
    table += [[*begin, *(values.get(key, "") for key in keys), *end] for begin, values, end in rows]
    cells = [[on_one_line(cell) for cell in row] for row in table]
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
