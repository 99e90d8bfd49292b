"""The folder of a sweep: which one to go on with, which job is where, and how the jobs are run."""

import csv
import itertools
import math
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, did_you_mean, one_line, raise_problems
from regimen.conf.schema import SweepConfig, Values
from regimen.scripts.cli.arguments import PRIMARY, RUNS, Arguments, key_of, run_dir_override
from regimen.scripts.cli.console import logger
from regimen.scripts.cli.signals import handling
from regimen.scripts.composition.overrides import OF_A_START, Swept, belongs_outside, identity
from regimen.scripts.sweeps import leaderboard
from regimen.scripts.sweeps.launchers import (
    CLUSTERS,
    PATIENCE,
    AnyLauncher,
    LocalLauncher,
    options_of,
)
from regimen.scripts.sweeps.leaderboard import FILE, NOT_STARTED, RUNNING, Job, Ranking
from regimen.scripts.sweeps.report import write_report
from regimen.trainer.errors import StorageError
from regimen.trainer.files.atomic import write_json
from regimen.trainer.runs.directory import (
    CONFIG,
    OVERRIDES,
    locked,
    make_folder,
    name_folder,
    refuse_links,
    reserve,
    timestamp,
)
from regimen.trainer.runs.lock import is_held
from regimen.trainer.runs.status import (
    ENDED_WELL,
    SWEEP,
    TENSORBOARD,
    check_run_dir,
    holds_run,
    read_metrics,
    read_own,
    read_status,
)

_STAMP = len(timestamp())  # a number follows for a sweep that began in the same second
_EVERY = 30.0  # seconds between two lines of a job
_MISTAKES = (1, 2, 3, 4)  # exit codes: of code, configuration, data, checkpoint
_FEW = 3  # jobs that fail alike before a search gives up
_TAIL = 1 << 14  # bytes of a log
_STOPPED = (-15, -2, 130, 143)  # exit codes before a run exists
# Exit codes: a lost process, out of memory, and signals that the sweep did not send.
_LOST = (6, 8, 130, 143)


class Sweep:
    """A folder of jobs, and how those that ran have ended.

    `config`: of the first job; it has the metric by which all are compared. `varied`: the keys that
    differ between jobs. `count`: jobs, including those that are not known yet.
    """

    def __init__(
        self, arguments: Arguments, config: Values, varied: Sequence[str], count: int
    ) -> None:
        self.arguments, self.config, self.varied, self.count = arguments, config, varied, count
        self.settings = parse(config).sweep or SweepConfig()
        self.devices = "", list[str]()  # of `regimen.trainer.device.visible`, once known
        self.metric: str | None = None  # of the task, if it is known
        self.modes: dict[str, str] = {}  # what the task says of its metrics (`Task.modes`)
        self.decided = False  # whether jobs are compared by it whatever they log
        self.heard = list[int]()  # signals that ask the sweep to end
        self.launcher: AnyLauncher
        if cluster := CLUSTERS.get(self.settings.launcher):
            options = options_of(self.settings.launcher_options, arguments.overrides)
            self.launcher = cluster(options)
        given = self.settings.group_by or []
        self.group_by = [given] if isinstance(given, str) else given
        what = "does not vary between the jobs"
        raise_problems(
            Problem("sweep.group_by", f"{key!r} {what}", did_you_mean(key, varied))
            for key in self.group_by
            if key not in varied
        )
        self.found = _find_sweep(config)
        self._known = dict[tuple[str, ...], Path]()
        if self.found is not None:
            refuse_links(self.found)
            self._known = job_folders(self.found)
        self._planned = dict[tuple[str, ...], Job]()
        self._complaints = set[str]()  # about the leaderboard's file

    def knows(self, overrides: Sequence[Swept]) -> Path | None:
        """Return the folder that an earlier start gave a job."""
        return self._known.get(identity(override.text for override in overrides))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make and lock the sweep's folder, and record signals instead of ending at once.

        Raises StorageError if it cannot be made, RunDirectoryError if another process holds it.
        """
        given = self.found or self.config["run_dir"]
        self.folder = Path(given) if given else reserve(_sweeps(self.config), timestamp())
        make_folder(self.folder)
        refuse_links(self.folder)
        lock = locked(self.folder)
        self._taken = {path.name for path in self.folder.iterdir()}
        if (wanted := self.settings).launcher == "local":  # the devices are counted now
            self.launcher = LocalLauncher(wanted.jobs or 1, wanted.jobs_per_device, self.devices)
        if self.found is not None:
            print(f"going on with the sweep {self.folder}", flush=True)
        write_json(self.folder / SWEEP, {"swept": list(self.varied)})
        board = shlex.quote(str(self.folder / TENSORBOARD))
        print(f"follow the sweep: tensorboard --logdir {board}", flush=True)
        try:
            with handling(lambda number, _: self.heard.append(number)):
                yield
        finally:
            self.launcher.close()
            lock.release()

    def plan(self, overrides: Sequence[Swept], config: Values) -> Job:
        """Give a job its folder, or the next free one; the result of a finished job is read."""
        texts = [override.text for override in overrides]
        name = identity(texts)
        if name in self._planned:
            self.count -= 1
            return self._planned[name]
        free = (str(n) for n in itertools.count() if str(n) not in self._taken)
        folder = self._known.get(name) or self.folder / next(free)
        self._taken.add(folder.name)
        values = {o.key: o.value for o in overrides if not belongs_outside(o.key)}
        job = self._planned[name] = Job(int(folder.name), folder, values, texts, config)
        if has_finished(folder, config):
            job.end(0)
        return job

    @property
    def jobs(self) -> list[Job]:
        """Return all jobs that are known so far, in the order of the grid."""
        return list(self._planned.values())

    def words(self, job: Job) -> list[str]:
        """Return the arguments of `train` for a job."""
        keys = {text: key_of(text) for text in job.texts}
        kept = [t for t, k in keys.items() if not belongs_outside(k) or k == "resume_policy"]
        if holds_run(job.run_dir):
            kept.append("resume=auto")
        elif self.config["resume"] not in (None, "auto"):  # a checkpoint from which all jobs begin
            kept += [text for text, key in keys.items() if key == "resume"]
        return [*flags(self.arguments), *kept, *job.more, run_dir_override(job.run_dir)]

    @property
    def ended(self) -> bool:
        """Return whether no further job starts: after a signal, or a failure with `fail_fast`."""
        failed = any(job.failed for job in self.jobs)
        return bool(self.heard) or (self.settings.fail_fast and failed)

    def fails_alike(self) -> str | None:
        """Return what the first jobs of this start have all failed by; None if they have not.

        Jobs that diverged or lacked memory tell of their values only, and others may do better. The
        numbers in a reason differ with the values that a search gives a job.
        """
        started = [job for job in self.jobs if job.starts and job.state != RUNNING]
        reasons = {(job.code, re.sub(r"\d+", "N", job.reason)) for job in started}
        broken = all(job.failed and job.code in _MISTAKES for job in started)
        if len(started) < _FEW or len(reasons) > 1 or not broken:
            return None
        code, reason = started[0].code, started[0].reason
        return f"all of its first {len(started)} jobs failed alike (exit {code}): {reason}"

    @property
    def ranking(self) -> Ranking:
        """Return how the jobs compare, by what is known so far."""
        return Ranking(self.config, self.jobs, self.metric, self.decided, self.modes)

    def run(
        self, ask: Callable[[], Job | None], tell: Callable[[Job], None] = lambda job: None
    ) -> None:
        """Run jobs until there are none left or the sweep must end, up to `sweep.jobs` at a time.

        `ask` returns the next job, None after the last one. `tell` is called with each job that has
        ended and is not restarted.
        """
        launcher, queue, running = self.launcher, list[Job](), list[Job]()
        most = self.settings.jobs or (1 if self.settings.launcher == "local" else math.inf)
        sent = 0  # signals
        began, before = time.monotonic(), self._done()
        print(launcher.description, flush=True)
        while True:
            while not self.ended and len(running) < most:
                job = queue.pop(0) if queue else ask()
                if job is None:
                    break
                if self.ended or not launcher.start(job, self.words(job), running):
                    queue.insert(0, job)
                    break
                running.append(job)
                job.starts, job.state, job.told = job.starts + 1, RUNNING, time.monotonic()
                self._say_start(job)
                self.write()
            if not running:
                return
            for job in list(running):
                if (code := launcher.poll(job)) is None:
                    say_progress(job, self.ranking.name)
                    continue
                running.remove(job)
                if self.heard and code in _STOPPED and not holds_run(job.run_dir):
                    job.state = NOT_STARTED
                else:
                    job.end(code)
                lost = code < 0 or code in _LOST
                if lost and job.starts <= self.settings.retries and not self.heard:
                    print(one_line(f"job {job.number} starts again: {job.reason}"), flush=True)
                    queue.append(job)
                    continue
                self.write()
                self._say_end(job, (time.monotonic() - began) / max(1, self._done() - before))
                tell(job)
            for number in self.heard[sent:]:
                launcher.send(number, running)
                sent += 1
            time.sleep(PATIENCE)

    def _done(self) -> int:
        # A preempted job goes on with the sweep.
        return sum(job.state not in (NOT_STARTED, RUNNING, "preempted") for job in self.jobs)

    def _say_start(self, job: Job) -> None:
        given = job.overrides
        varied = " ".join(f"{key}={given[key]}" for key in self.varied if key in given)
        again = f" (start {job.starts})" if job.starts > 1 else ""
        line = one_line(f"{varied}  ->  {job.run_dir}{again}")
        print(f"[{self.jobs.index(job) + 1}/{self.count}] {line}", flush=True)

    def _say_end(self, job: Job, seconds: float) -> None:
        ranking, done = self.ranking, self._done()
        value = ranking.value(job)
        result = "" if value is None else f" {ranking.name} {value:.4f}"
        why = f": {job.reason}" if job.failed else ""
        told = one_line(f"job {job.number} {job.state}{result}{why}")
        facts = [told, f"{done} of {self.count} done"]
        if compared := ranking.compared():
            best = compared[0]
            facts.append(f"best {ranking.name} {ranking.value(best):.4f} (job {best.number})")
        if (left := self.count - done) and not self.ended:
            facts.append(f"about {timedelta(seconds=round(seconds * left))} left")
        print("; ".join(facts), flush=True)

    def write(self) -> None:
        """Write the leaderboard as it stands, and show the jobs in TensorBoard."""
        with suppress(OSError):  # a dashboard must not end a sweep
            leaderboard.link_jobs(self.folder, self.jobs, self.varied)
        try:
            leaderboard.write_csv(self.folder, self.ranking, self.group_by, self.count)
        except StorageError as error:  # the running jobs are not affected
            if str(error) not in self._complaints:
                logger.warning("warning: %s", error)
            self._complaints.add(str(error))

    def close(self) -> int:
        """Print the table, draw the report and return the exit code."""
        self.write()
        leaderboard.show(self.folder, self.ranking, self.group_by, self.varied)
        if self.settings.report and not self.heard:
            # Folds and what is averaged over are no scales: no line leads from one to the next.
            apart = {"data.fold", *self.group_by}
            scales = [key for key in self.varied if key not in apart]
            write_report(self.folder, self.ranking, scales)
        if self.ended:
            kept = [t for t in self.arguments.overrides if key_of(t) != "run_dir"]
            if self.config["resume"] in (None, "auto"):
                kept = [*(t for t in kept if key_of(t) != "resume"), "resume=auto"]
            words = [*flags(self.arguments), *kept, run_dir_override(self.folder)]
            why = "interrupted" if self.heard else "sweep.fail_fast ended it"
            print(f"{why}; go on with the sweep: {shlex.join(['train', '-m', *words])}")
        if self.heard:
            return 130 if self.heard[0] == signal.SIGINT else 143
        return next((job.code for job in self.jobs if job.code), 0)


def say_progress(job: Job, metric: str) -> None:
    """Print now and then where a long job is."""
    if time.monotonic() - job.told < _EVERY:
        return
    job.told = time.monotonic()
    last = {k: v for line in read_metrics(job.run_dir, _TAIL) for k, v in line.items()}
    if last:
        value = f", {metric} {last[metric]}" if metric in last else ""
        epochs = (job.config.get("trainer") or {}).get("max_epochs")
        where = f"epoch {last.get('epoch')} of {epochs}, step {last.get('step')}"
        print(f"job {job.number}: {where}{value}", flush=True)


def flags(arguments: Arguments) -> list[str]:
    """Return the flags that a command line of ours has besides its overrides."""
    name, path = arguments.config_name, arguments.config_path
    words = [] if name == PRIMARY else [f"--config-name={name}"]
    words += [] if path is None else [f"--config-path={path}"]
    words += [f"--config-dir={folder}" for folder in arguments.config_dirs]
    return words + [f"--allow-target={package}" for package in arguments.allow_targets]


def _find_sweep(config: Values) -> Path | None:
    if config["run_dir"] is None:
        return newest_unfinished(_sweeps(config)) if config["resume"] == "auto" else None
    folder = Path(config["run_dir"])
    check_run_dir(folder)
    used = (folder / FILE).exists() or holds_run(folder / "0")
    if holds_run(folder) or (used and config["resume"] is None):
        hint = "resume=auto goes on with it" if used else "choose another run_dir"
        raise ConfigError("run_dir", f"{folder} holds a run or a sweep already", hint)
    return folder if used else None


def _sweeps(config: Values) -> Path:
    return name_folder(RUNS, config["name"]) / "sweeps"


def newest_unfinished(sweeps: Path) -> Path | None:
    """Return the newest sweep in a folder with an unfinished job that no process holds."""

    def unfinished(folder: Path) -> bool:
        board = folder / FILE
        with suppress(OSError, ValueError, KeyError), board.open(encoding="utf-8") as file:
            rows = [*csv.DictReader(file)]
            return not rows or any(row["status"] not in ENDED_WELL for row in rows)
        return True  # unreadable: the status of each job decides

    found = [board.parent for board in sweeps.glob(f"*/{FILE}")]
    found.sort(key=lambda f: (f.name[:_STAMP], len(f.name), f.name), reverse=True)  # -10 after -9
    return next((f for f in found if unfinished(f) and not is_held(f)), None)


def job_folders(sweep: Path) -> dict[tuple[str, ...], Path]:
    """Return the folder of each job, by the overrides that it was made with."""
    numbered = [p for p in sweep.iterdir() if p.name.isdecimal() and not p.is_symlink()]
    folders = dict[tuple[str, ...], Path]()
    for path in sorted(numbered, key=lambda path: int(path.name)):
        # One that cannot be read is the folder of no known job.
        with suppress(OSError, ValueError, TypeError, ConfigError):
            texts = read_own(path / OVERRIDES)
            folders.setdefault(identity(map(str, texts)), path)
    return folders


def has_finished(folder: Path | None, config: Values) -> bool:
    """Return whether the run in a folder, if there is one, has finished with a configuration."""
    outside = dict.fromkeys((*OF_A_START, "tags"))
    with suppress(OSError, ValueError, ConfigError):
        if folder is not None and read_status(folder).get("state") in ENDED_WELL:
            saved = read_own(folder / CONFIG)
            return isinstance(saved, dict) and saved | outside == config | outside
    return False
