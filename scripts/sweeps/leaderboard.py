"""The jobs of a sweep and how they ended: ranked, as a table, in `leaderboard.csv` and as links."""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean, stdev
from typing import Any

from regimen.callbacks.support import AUTO, Monitor
from regimen.conf.errors import one_line
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import aligned, as_csv
from regimen.trainer.runs.status import ENDED_WELL, TENSORBOARD, RunDirectoryError, read_status
from regimen.trainer.state import epoch_metric

FILE = "leaderboard.csv"
NOT_STARTED, RUNNING = "not started", "running"
SHOWN = 20  # jobs of the table on the screen
_BEST = "best/"
_STATISTICS = ("mean", "std", "n")  # of a group
Shared = tuple[tuple[str, str], ...]  # what the jobs of a group have in common


@dataclass(slots=True)
class Job:
    """A job of a sweep, known by its overrides, and how it stands or ended."""

    number: int  # the name of its folder
    run_dir: Path
    overrides: dict[str, str]  # the values of keys that affect what it trains
    texts: list[str] = field(default_factory=list)  # all its overrides, as on a command line
    config: dict[str, Any] = field(default_factory=dict)  # {} where it is not known
    more: list[str] = field(default_factory=list)  # overrides that do not affect what it trains
    starts: int = 0
    task: Any = None  # what its launcher knows it by, while it runs
    devices: list[str] = field(default_factory=list)  # of its own
    told: float = 0.0  # time of the last line about it
    state: str = NOT_STARTED
    code: int = 0
    reason: str = ""
    seconds: float | None = None
    results: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)  # metric, value, step, mode

    @property
    def failed(self) -> bool:
        """Return whether the job ran and did not end well."""
        return self.state not in (*ENDED_WELL, "stopped", NOT_STARTED, RUNNING)

    @property
    def output(self) -> Path:
        """Return the file of what it prints."""
        return self.run_dir.parent / "output" / f"{self.number}.txt"

    def end(self, code: int) -> None:
        """Note the end of its process by its code; -N: killed by signal N."""
        status = {}
        with suppress(RunDirectoryError):
            status = read_status(self.run_dir)
        state = str(status.get("state") or ("failed" if code else "finished"))
        self.state = "failed" if code and state in (*ENDED_WELL, RUNNING) else state
        self.code = 128 - code if code < 0 else code
        self.seconds, self.results = status.get("seconds"), status.get("results") or {}
        if isinstance(status.get("best"), dict):
            self.best = status["best"]
        self.reason = ""
        if code > 0:
            said = ""
            if self.output.is_file() and not self.output.is_symlink():
                said = self.output.read_text("utf-8", "replace")
            told = re.findall(r"^error: (.*)", said, re.MULTILINE) or [f"see {self.output}"]
            self.reason = str(status.get("reason") or told[-1].strip())
        elif code < 0:
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            way_out = f"; go on with: {status['resume']}" if status.get("resume") else ""
            self.reason = f"killed by {signal.Signals(-code).name}{memory}{way_out}"


class Ranking:
    """Compare jobs by the metric that their checkpoints are chosen by.

    The configuration names it, else the results do, else it is the one `expected` of the task. With
    `decided` results have no say: a search compares by the metric of its study. `said`: what the
    task says of its metrics (`Task.modes`), which jobs that ended have noted as well.
    """

    def __init__(
        self,
        config: dict[str, Any],
        jobs: Sequence[Job],
        expected: str | None = None,
        decided: bool = False,
        said: Mapping[str, str] | None = None,
    ) -> None:
        self.jobs = jobs
        modes = {
            epoch_metric(node["monitor"]): node.get("mode", AUTO)
            for node in config["callbacks"].values()
            if node and node.get("monitor") not in (None, AUTO)  # there the task decides
        }
        known = next(reversed(modes), expected or "val/loss")
        best = (k.removeprefix(_BEST) for job in jobs for k in job.results if k.startswith(_BEST))
        self.name = known if decided else next(best, known)
        judge = Monitor(self.name, modes.get(self.name, AUTO))
        ended = [job.best for job in jobs if "mode" in job.best]
        noted = {str(best.get("metric")): str(best["mode"]) for best in ended}
        judge.find_direction({**noted, **(said or {})})
        self.rank_of = judge.rank
        self.larger_is_better = self.rank_of(1.0) < 0

    def value(self, job: Job) -> float | None:
        """Return a job's best value, or its last where the best was not recorded."""
        found = job.results.get(_BEST + self.name, job.results.get(self.name))
        return found if isinstance(found, int | float) else None

    def ranked(self) -> list[Job]:
        """Return the jobs from the best to the worst; then those that failed, then the rest.

        The pruned, which were trained less, come behind those that ran to their end.
        """

        def place(job: Job) -> tuple[bool, bool, bool, bool, float, int]:
            value = self.value(job)
            rank = 0.0 if value is None else self.rank_of(value)
            waits, short = job.state in (NOT_STARTED, RUNNING), job.state == "pruned"
            return waits, job.failed, value is None, short, rank, job.number

        return sorted(self.jobs, key=place)

    def compared(self) -> list[Job]:
        """Return the jobs that have a result, the best first."""
        return [job for job in self.ranked() if not job.failed and self.value(job) is not None]

    def groups(self, keys: Sequence[str]) -> dict[Shared, list[float]]:
        """Return the results of jobs that differ in `keys` only, by what they share; failed: none.

        The group with the best mean comes first.
        """
        found: dict[Shared, list[float]] = {_shared(job, keys): [] for job in self.jobs}
        for job in self.compared():
            found[_shared(job, keys)].append(self.value(job) or 0.0)
        means = {name: self.rank_of(fmean(values or [0.0])) for name, values in found.items()}
        return {n: found[n] for n in sorted(found, key=lambda n: (not found[n], means[n]))}

    def row(self, job: Job, keys: Iterable[str], shown: Callable[[float], str]) -> list[str]:
        """Return number, state, values, result and seconds of a job as text."""
        value, given = self.value(job), (job.overrides.get(key, "") for key in keys)
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        return [str(job.number), job.state, *given, "" if value is None else shown(value), seconds]


def _shared(job: Job, keys: Sequence[str]) -> Shared:
    return tuple((key, value) for key, value in job.overrides.items() if key not in keys)


def _statistics(values: Sequence[float], shown: Callable[[float], str]) -> list[str]:
    mean = shown(fmean(values)) if values else ""
    deviation = shown(stdev(values)) if len(values) > 1 else ""
    return [mean, deviation, str(len(values))]


def write_csv(folder: Path, ranking: Ranking, group_by: Sequence[str], count: int) -> None:
    """Write all jobs, ranked, with every override that was given and the statistics of its group.

    A search knows its next jobs one by one: those missing of `count` are listed without numbers.
    Raises StorageError.
    """
    keys = list(dict.fromkeys(key for job in ranking.jobs for key in job.overrides))
    groups, more = ranking.groups(group_by), _STATISTICS if group_by else ()
    rows = [["job", "status", *keys, ranking.name, "seconds", "run_dir", *more]]
    for job in ranking.ranked():
        statistics = _statistics(groups[_shared(job, group_by)], repr) if group_by else ()
        rows.append([*ranking.row(job, keys, repr), str(job.run_dir), *statistics])
    rows += [["", NOT_STARTED, *[""] * (len(rows[0]) - 2)]] * (count - len(ranking.jobs))
    write_text(folder / FILE, as_csv(rows))


def show(folder: Path, ranking: Ranking, group_by: Sequence[str], varied: Sequence[str]) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    ranked, shown, columns = ranking.ranked(), "{:.4f}".format, get_terminal_size().columns
    rows = [["job", "status", *short_keys(varied), ranking.name, "seconds"]]
    rows += [ranking.row(job, varied, shown) for job in ranked[:SHOWN]]
    print("", one_line(f"sweep {folder}"), *aligned(rows, columns, last=2), sep="\n")
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    if group_by:
        keys = [key for key in varied if key not in group_by]
        rows = [[*short_keys(keys), *_STATISTICS]]
        for name, values in list(ranking.groups(group_by).items())[:SHOWN]:
            given = dict(name)
            rows.append([*(given.get(key, "") for key in keys), *_statistics(values, shown)])
        title = f"{ranking.name} over {', '.join(group_by)}"
        print("", title, *aligned(rows, columns, last=2), sep="\n")
    for job in ranking.jobs:
        if job.failed:
            print(one_line(f"job {job.number} {job.state} (exit {job.code}): {job.reason}"))
    print(one_line(f"leaderboard: {folder / FILE}"))


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest end of each dotted key that no other of them has."""
    parts = [key.split(".") for key in keys]
    ends = [[".".join(part[-n:]) for n in range(1, len(part) + 1)] for part in parts]
    known = Counter(end for of_one in ends for end in of_one)
    return [next((end for end in of_one if known[end] == 1), of_one[-1]) for of_one in ends]


def link_jobs(sweep: Path, jobs: Sequence[Job], varied: Sequence[str]) -> None:
    """Link each job that has begun in `tensorboard/`, by what varies: `lr=0.1,seed=2`.

    Links of jobs that the grid has no more are removed. A `tensorboard` that is a link itself is
    left alone. Raises OSError.
    """
    board, links = sweep / TENSORBOARD, dict[str, str]()
    if board.is_symlink():
        return
    for job in jobs:
        own = job.run_dir / TENSORBOARD
        if not own.is_dir() and job.state != RUNNING:
            continue  # an open TensorBoard finds the folder of one that runs once it is there
        pairs = zip(short_keys(varied), varied, strict=True)
        name = ",".join(f"{k}={job.overrides[key]}" for k, key in pairs if key in job.overrides)
        # TensorBoard takes a slash for a group of runs; file systems allow 255 bytes.
        name = re.sub(r"[^ -.0-~]|\\", "_", name).strip(".")[:150] or f"job {job.number}"
        name = name if name not in links else f"{name},job={job.number}"
        links[name] = os.path.relpath(own, board)
    board.mkdir(exist_ok=True)
    there = {path.name: os.readlink(path) for path in board.iterdir() if path.is_symlink()}
    for name, _ in there.items() - links.items():
        (board / name).unlink()
    for name, target in links.items() - there.items():
        (board / name).symlink_to(target)
