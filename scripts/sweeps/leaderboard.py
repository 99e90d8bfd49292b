"""The jobs of a sweep and their results: ranked, as a table, in `leaderboard.csv` and as links."""

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
from regimen.scripts.cli.signals import signal_name
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import as_csv, format_table
from regimen.trainer.runs.status import ENDED_WELL, TENSORBOARD, RunDirectoryError, read_status
from regimen.trainer.state import epoch_metric

FILE = "leaderboard.csv"
NOT_STARTED, RUNNING = "not started", "running"
SHOWN = 20  # jobs in the table on the screen
_BEST = "best/"
_STATISTICS = ("mean", "std", "n")  # columns on a group
_LONGEST_LINK = 150  # characters; file systems allow 255 bytes
Group = tuple[tuple[str, str], ...]  # key and value of the overrides that its jobs have in common
Format = Callable[[float], str]
_rounded: Format = "{:.4f}".format


@dataclass(slots=True)
class Job:
    """A job of a sweep, identified by its overrides, and its state or result."""

    number: int  # the name of its folder
    run_dir: Path
    overrides: dict[str, str]  # the values of keys that affect what it trains
    texts: list[str] = field(default_factory=list)  # all its overrides, as on a command line
    config: dict[str, Any] = field(default_factory=dict)  # {} where it is not known
    more_texts: list[str] = field(default_factory=list)  # overrides that do not affect the training
    starts: int = 0
    handle: Any = None  # of its launcher: a process, or a job of the cluster
    devices: list[str] = field(default_factory=list)  # names of the accelerators it may use
    reported_at: float = 0.0  # time of the last line about it
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

    def assignments(self, names: Mapping[str, str]) -> list[str]:
        """Return its values as `name=value`; `names`: how each key is called."""
        texts = []
        for key, name in names.items():
            if key in self.overrides:
                texts.append(f"{name}={self.overrides[key]}")
        return texts

    @property
    def output(self) -> Path:
        """Return the file that its output goes to."""
        return self.run_dir.parent / "output" / f"{self.number}.txt"

    def end(self, code: int) -> None:
        """Record the end of its process; `code`: its exit code, -N if signal N killed it."""
        status = {}
        with suppress(RunDirectoryError):  # where it cannot be read, the exit code decides
            status = read_status(self.run_dir)
        self.state = str(status.get("state") or "finished")
        if code and self.state in (*ENDED_WELL, RUNNING):
            self.state = "failed"
        self.seconds = status.get("seconds")
        self.results = status.get("results") or {}
        if isinstance(status.get("best"), dict):
            self.best = status["best"]
        self.code = code
        self.reason = ""
        if code > 0:
            self.reason = str(status.get("reason") or self._last_error())
        elif code < 0:
            self.code = 128 - code  # as shells return it
            self.reason = _killed_by(-code, status.get("resume"))

    def _last_error(self) -> str:
        """Return the last `error:` line of its output; else where the output is."""
        output = self.output
        if output.is_file() and not output.is_symlink():
            text = output.read_text("utf-8", "replace")
            errors: list[str] = re.findall(r"^error: (.*)", text, re.MULTILINE)
            if errors:
                return errors[-1].strip()
        return f"see {output}"


def _killed_by(number: int, resume_command: str | None) -> str:
    """Return the reason of a job that a signal has killed, and how it goes on."""
    reason = f"killed by {signal_name(number)}"
    if number == signal.SIGKILL:
        reason += " (out of memory?)"
    if resume_command:
        reason += f"; go on with: {resume_command}"
    return reason


class Ranking:
    """Compare jobs by the metric that their checkpoints are chosen by.

    The metric is the one that the results name, else the monitor of the configuration, else
    `task_metric`. With `decided` results have no say: a search compares by the metric of its study.
    `task_modes`: what the task says of its metrics (`Task.modes`); it has precedence over what the
    jobs that ended have recorded.
    """

    def __init__(
        self,
        config: dict[str, Any],
        jobs: Sequence[Job],
        task_metric: str | None = None,
        decided: bool = False,
        task_modes: Mapping[str, str] | None = None,
    ) -> None:
        self.jobs = jobs
        monitored = _monitored(config)
        self.name = task_metric or "val/loss"
        if monitored:
            self.name = next(reversed(monitored))
        if not decided:
            self.name = self._recorded_metric() or self.name

        modes = dict[str, str]()
        for job in jobs:
            if "mode" in job.best:
                modes[str(job.best.get("metric"))] = str(job.best["mode"])
        if task_modes is not None:
            modes |= task_modes
        monitor = Monitor(self.name, monitored.get(self.name, AUTO))
        monitor.find_direction(modes)
        self.rank_of = monitor.rank
        self.larger_is_better = self.rank_of(1.0) < 0

    def _recorded_metric(self) -> str | None:
        """Return the metric that the results name."""
        for job in self.jobs:
            for name in job.results:
                if name.startswith(_BEST):
                    return name.removeprefix(_BEST)
        return None

    def value(self, job: Job) -> float | None:
        """Return a job's best value, or its last where the best was not recorded."""
        last = job.results.get(self.name)
        value = job.results.get(_BEST + self.name, last)
        if isinstance(value, int | float):
            return value
        return None

    def ranked(self) -> list[Job]:
        """Return the jobs from the best to the worst; then those that failed, then the rest.

        Pruned jobs, which were trained less, come behind those that ran to their end.
        """

        def position(job: Job) -> tuple[bool, bool, bool, bool, float, int]:
            value = self.value(job)
            return (
                job.state in (NOT_STARTED, RUNNING),
                job.failed,
                value is None,
                job.state == "pruned",
                0.0 if value is None else self.rank_of(value),
                job.number,
            )

        return sorted(self.jobs, key=position)

    def compared(self) -> list[tuple[Job, float]]:
        """Return the jobs that have a result, and it, the best first."""
        results = []
        for job in self.ranked():
            value = self.value(job)
            if value is not None and not job.failed:
                results.append((job, value))
        return results

    def groups(self, keys: Sequence[str]) -> dict[Group, list[float]]:
        """Group the results of jobs that differ in `keys` only; jobs that failed have none.

        The group with the best mean comes first.
        """
        results = dict[Group, list[float]]()
        for job in self.jobs:
            results[_group_of(job, keys)] = []
        for job, value in self.compared():
            results[_group_of(job, keys)].append(value)

        def position(group: Group) -> tuple[bool, float]:
            values = results[group]
            if not values:
                return True, 0.0
            return False, self.rank_of(fmean(values))

        return {group: results[group] for group in sorted(results, key=position)}

    def row(self, job: Job, keys: Iterable[str], format_value: Format) -> list[str]:
        """Return number, state, values, result and seconds of a job as text."""
        cells = [str(job.number), job.state]
        for key in keys:
            cells.append(job.overrides.get(key, ""))
        value = self.value(job)
        cells.append("" if value is None else format_value(value))
        cells.append("" if job.seconds is None else f"{job.seconds:.1f}")
        return cells


def _monitored(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics that callbacks monitor, in their order, and the mode of each."""
    modes = {}
    for callback in config["callbacks"].values():
        if callback and callback.get("monitor") not in (None, AUTO):
            metric = epoch_metric(callback["monitor"])
            modes[metric] = callback.get("mode", AUTO)
    return modes


def _group_of(job: Job, keys: Sequence[str]) -> Group:
    common = []
    for key, value in job.overrides.items():
        if key not in keys:
            common.append((key, value))
    return tuple(common)


def _statistics(values: Sequence[float], format_value: Format) -> list[str]:
    mean = format_value(fmean(values)) if values else ""
    deviation = format_value(stdev(values)) if len(values) > 1 else ""
    return [mean, deviation, str(len(values))]


def write_csv(folder: Path, ranking: Ranking, group_by: Sequence[str], count: int) -> None:
    """Write all jobs, ranked, with every override that was given and the statistics of its group.

    A search plans its jobs one by one: those missing of `count` are listed without numbers. Raises
    StorageError.
    """
    keys = dict[str, None]()  # each once, in the order in which they were given
    for job in ranking.jobs:
        keys |= dict.fromkeys(job.overrides)
    header = ["job", "status", *keys, ranking.name, "seconds", "run_dir"]
    groups = {}
    if group_by:
        header += _STATISTICS
        groups = ranking.groups(group_by)
    rows = [header]
    for job in ranking.ranked():
        row = [*ranking.row(job, keys, repr), str(job.run_dir)]
        if group_by:
            row += _statistics(groups[_group_of(job, group_by)], repr)
        rows.append(row)
    unplanned = ["", NOT_STARTED, *[""] * (len(header) - 2)]
    rows += [unplanned] * (count - len(ranking.jobs))
    write_text(folder / FILE, as_csv(rows))


def show(folder: Path, ranking: Ranking, group_by: Sequence[str], varied: Sequence[str]) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    ranked = ranking.ranked()
    rows = [["job", "status", *short_keys(varied), ranking.name, "seconds"]]
    for job in ranked[:SHOWN]:
        rows.append(ranking.row(job, varied, _rounded))
    _print_table(one_line(f"sweep {folder}"), rows)
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    if group_by:
        _show_groups(ranking, group_by, varied)
    for job in ranking.jobs:
        if job.failed:
            print(one_line(f"job {job.number} {job.state} (exit {job.code}): {job.reason}"))
    print(one_line(f"leaderboard: {folder / FILE}"))


def _show_groups(ranking: Ranking, group_by: Sequence[str], varied: Sequence[str]) -> None:
    keys = [key for key in varied if key not in group_by]
    rows = [[*short_keys(keys), *_STATISTICS]]
    groups = ranking.groups(group_by)
    for group in list(groups)[:SHOWN]:
        overrides = dict(group)
        row = [overrides.get(key, "") for key in keys]
        row += _statistics(groups[group], _rounded)
        rows.append(row)
    _print_table(f"{ranking.name} over {', '.join(group_by)}", rows)


def _print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    lines = format_table(rows, get_terminal_size().columns, last=2)
    print("", title, *lines, sep="\n")


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return for each dotted key its shortest end that no other key has."""
    counts = Counter[str]()
    for key in keys:
        counts.update(_ends(key))
    shortest = []
    for key in keys:
        own_ends = (end for end in _ends(key) if counts[end] == 1)
        shortest.append(next(own_ends, key))
    return shortest


def _ends(key: str) -> list[str]:
    """Return the ends of a dotted key, the shortest first: c, b.c and a.b.c of a.b.c."""
    ends = list[str]()
    for part in reversed(key.split(".")):
        ends.append(f"{part}.{ends[-1]}" if ends else part)
    return ends


def link_jobs(sweep: Path, jobs: Sequence[Job], varied: Sequence[str]) -> None:
    """Link each job that has begun in `tensorboard/`, by what varies: `lr=0.1,seed=2`.

    Links of jobs that are no longer in the grid are removed. A `tensorboard` that is a link itself
    is left alone. Raises OSError.
    """
    board = sweep / TENSORBOARD
    if board.is_symlink():
        return
    links = _links(board, jobs, varied)
    board.mkdir(exist_ok=True)
    existing = dict[str, str]()
    for path in board.iterdir():
        if path.is_symlink():
            existing[path.name] = os.readlink(path)
    # A link with another target than before is in both differences: it is made anew.
    for name, _ in existing.items() - links.items():
        (board / name).unlink()
    for name, target in links.items() - existing.items():
        (board / name).symlink_to(target)


def _links(board: Path, jobs: Sequence[Job], varied: Sequence[str]) -> dict[str, str]:
    """Return name and target of the links of all jobs that have begun."""
    names = dict(zip(varied, short_keys(varied), strict=True))
    links = dict[str, str]()
    for job in jobs:
        target = job.run_dir / TENSORBOARD
        # A running job is linked before its folder exists: an open TensorBoard then finds it.
        if not target.is_dir() and job.state != RUNNING:
            continue
        name = ",".join(job.assignments(names))
        # Printable ASCII without slashes: TensorBoard takes a slash for a group of runs.
        # Without dots at its ends the name is neither `.` nor `..`.
        name = re.sub(r"[^ -.0-~]|\\", "_", name).strip(".")[:_LONGEST_LINK]
        if not name:
            name = f"job {job.number}"
        if name in links:
            name = f"{name},job={job.number}"
        links[name] = os.path.relpath(target, board)
    return links
