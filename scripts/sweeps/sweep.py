"""Run the jobs of a sweep in its folder; find the folder of a sweep that was interrupted."""

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
from typing import Any

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, did_you_mean, one_line, raise_problems
from regimen.conf.schema import SweepConfig, Values
from regimen.conf.schema_trainer import name_strategy_class
from regimen.scripts.cli.arguments import PRIMARY, RUNS, Arguments, key_of, run_dir_override
from regimen.scripts.cli.console import logger
from regimen.scripts.cli.signals import handling
from regimen.scripts.composition.overrides import (
    START_KEYS,
    SweepOverride,
    belongs_outside,
    identity,
)
from regimen.scripts.sweeps import leaderboard
from regimen.scripts.sweeps.launchers import (
    CLUSTERS,
    POLL_SECONDS,
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
    read_run_yaml,
    read_status,
)

_STAMP_LENGTH = len(timestamp())  # a number follows if two sweeps began in the same second
_PROGRESS_SECONDS = 30.0  # between two lines about a running job
_MISTAKE_CODES = (1, 2, 3, 4)  # exit codes: of code, configuration, data, checkpoint
_ALIKE_FAILURES = 3  # jobs that fail for one reason before a search gives up
_TAIL_BYTES = 16_384  # of a log
_STOPPED_CODES = (-15, -2, 130, 143)  # exit codes after a signal
# Exit codes: a lost process, out of memory, and signals that the sweep did not send.
_RETRYABLE_CODES = (6, 8, 130, 143)


class Sweep:
    """A folder of jobs, and the state of those that have run.

    `config`: of the first job; its metric compares all jobs. `varied`: the keys that differ between
    jobs. `count`: the number of jobs, including those that a search has not planned yet.
    """

    def __init__(
        self, arguments: Arguments, config: Values, varied: Sequence[str], count: int
    ) -> None:
        self.arguments = arguments
        self.config = config
        self.varied = varied
        self.count = count
        self.settings = parse(config).sweep or SweepConfig()
        self.devices = ("", list[str]())  # of `regimen.trainer.device.visible`, once known
        self.metric: str | None = None  # of the task, if it is known
        self.modes: dict[str, str] = {}  # of the task's metrics (`Task.modes`)
        self.decided = False  # whether jobs are compared by `metric` whatever they log
        self.signals = list[int]()  # those that ask the sweep to end
        self.launcher: AnyLauncher
        cluster = CLUSTERS.get(self.settings.launcher)
        if cluster is not None:
            options = options_of(self.settings.launcher_options, arguments.overrides)
            self.launcher = cluster(options)
        group_by = self.settings.group_by or []
        self.group_by = [group_by] if isinstance(group_by, str) else group_by
        self._check_group_by()
        self._earlier = _find_sweep(config)  # the folder of the sweep to go on with
        self._folders = dict[tuple[str, ...], Path]()  # of its jobs, by their identity
        if self._earlier is not None:
            refuse_links(self._earlier)
            self._folders = job_folders(self._earlier)
        self._planned = dict[tuple[str, ...], Job]()  # by their identity
        self._ranking: Ranking | None = None  # None: a job has been planned or has ended since
        self._warnings = set[str]()  # about the leaderboard's file: each is printed once

    def _check_group_by(self) -> None:
        """Raise ConfigError for keys of `sweep.group_by` that do not vary."""
        problems = []
        for key in self.group_by:
            if key not in self.varied:
                problems.append(
                    Problem(
                        "sweep.group_by",
                        f"{key!r} does not vary between the jobs",
                        did_you_mean(key, self.varied),
                    )
                )
        raise_problems(problems)

    def folder_of(self, overrides: Sequence[SweepOverride]) -> Path | None:
        """Return the folder that an earlier start gave a job."""
        return self._folders.get(identity(override.text for override in overrides))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create and lock the sweep's folder, and record signals instead of ending at once.

        Raises StorageError if it cannot be created, RunDirectoryError if another process holds it.
        """
        folder = self._earlier or self.config["run_dir"]
        self.folder = Path(folder) if folder else reserve(_sweeps(self.config), timestamp())
        make_folder(self.folder)
        refuse_links(self.folder)
        # Another process that goes on with this sweep would start the same jobs.
        lock = locked(self.folder)
        taken = {path.name for path in self.folder.iterdir()}
        numbers = map(str, itertools.count())
        self._free_names = (number for number in numbers if number not in taken)
        settings = self.settings
        if settings.launcher == "local":  # only now: `devices` are counted by the check of the jobs
            self.launcher = LocalLauncher(
                settings.jobs or 1, settings.jobs_per_device, self.devices
            )
        if self._earlier is not None:
            print(f"going on with the sweep {self.folder}", flush=True)
        write_json(self.folder / SWEEP, {"swept": list(self.varied)})
        board = shlex.quote(str(self.folder / TENSORBOARD))
        print(f"follow the sweep: tensorboard --logdir {board}", flush=True)
        try:
            # A signal is only recorded: `run` forwards it, and waits until the jobs have saved.
            with handling(lambda number, _: self.signals.append(number)):
                yield
        finally:
            self.launcher.close()
            lock.release()

    def plan(self, overrides: Sequence[SweepOverride], config: Values) -> Job:
        """Give a job its folder, or the next free one; read the result of a finished job."""
        texts = [override.text for override in overrides]
        name = identity(texts)
        if name in self._planned:  # a search may suggest the same values twice
            return self._planned[name]
        folder = self._folders.get(name) or self.folder / next(self._free_names)
        values = {}
        for override in overrides:
            if not belongs_outside(override.key):
                values[override.key] = override.value
        job = Job(int(folder.name), folder, values, texts, config)
        self._planned[name] = job
        self._ranking = None
        if has_finished(folder, config):
            job.end(0)
        return job

    @property
    def jobs(self) -> list[Job]:
        """All jobs that are planned so far, in the order of the grid."""
        return list(self._planned.values())

    def arguments_of(self, job: Job) -> list[str]:
        """Return the arguments of `train` for a job."""
        overrides = []
        checkpoints = []  # the `resume=` from which all jobs begin
        for text in dict.fromkeys(job.texts):  # each once
            key = key_of(text)
            if key == "resume":
                checkpoints.append(text)
            elif key == "resume_policy" or not belongs_outside(key):
                overrides.append(text)
        if holds_run(job.run_dir):
            overrides.append("resume=auto")
        elif self.config["resume"] not in (None, "auto"):
            overrides += checkpoints
        overrides += [*job.more_texts, run_dir_override(job.run_dir)]
        return flags(self.arguments) + overrides

    @property
    def is_ending(self) -> bool:
        """Whether no further job starts: after a signal, or a failure with `fail_fast`."""
        if self.signals:
            return True
        return self.settings.fail_fast and any(job.failed for job in self.jobs)

    def common_failure(self) -> str | None:
        """Return why the first jobs of this start have all failed alike; None if they have not.

        Jobs that diverged or lacked memory do not count: other values may do better. Numbers in a
        reason are ignored: they differ with the values that a search gives a job.
        """
        ended = [job for job in self.jobs if job.starts and job.state != RUNNING]
        if len(ended) < _ALIKE_FAILURES:
            return None
        for job in ended:
            if not job.failed or job.code not in _MISTAKE_CODES:
                return None
        failures = {(job.code, re.sub(r"\d+", "N", job.reason)) for job in ended}
        if len(failures) > 1:
            return None
        first = ended[0]
        return (
            f"all of its first {len(ended)} jobs failed alike (exit {first.code}): {first.reason}"
        )

    @property
    def ranking(self) -> Ranking:
        """How the jobs compare, by what is known so far."""
        # Kept between two changes: it is asked for at each poll of each running job.
        if self._ranking is None:
            self._ranking = Ranking(self.config, self.jobs, self.metric, self.decided, self.modes)
        return self._ranking

    def run(
        self, ask: Callable[[], Job | None], tell: Callable[[Job], None] = lambda job: None
    ) -> None:
        """Run jobs until there are none left or the sweep must end, up to `sweep.jobs` at a time.

        `ask` returns the next job, None after the last one. `tell` is called with each job that has
        ended and is not restarted.
        """
        queue = list[Job]()  # jobs that start before `ask` is asked for another
        running = list[Job]()
        signals_sent = 0
        began = time.monotonic()
        done_before = self._done()
        print(self.launcher.description, flush=True)
        while True:
            self._start_jobs(ask, queue, running)
            if not running:
                return
            for job in list(running):
                code = self.launcher.poll(job)
                if code is None:
                    say_progress(job, self.ranking.name)
                    continue
                running.remove(job)
                self._record_end(job, code)
                if self._starts_again(job, code):
                    queue.append(job)
                    continue
                self.write()
                done = max(1, self._done() - done_before)
                self._print_end(job, seconds_per_job=(time.monotonic() - began) / done)
                tell(job)
            # The jobs do not get the signals of the terminal: each has a process group of its own.
            for number in self.signals[signals_sent:]:
                self.launcher.send(number, running)
                signals_sent += 1
            # Polled, not waited for: a job of a cluster is no child of this process.
            time.sleep(POLL_SECONDS)

    def _start_jobs(
        self, ask: Callable[[], Job | None], queue: list[Job], running: list[Job]
    ) -> None:
        """Start as many jobs as there is room for."""
        default_limit = 1 if self.settings.launcher == "local" else math.inf
        limit = self.settings.jobs or default_limit
        while not self.is_ending and len(running) < limit:
            job = queue.pop(0) if queue else ask()
            if job is None:
                return
            # `ask` takes a while: the sweep may have been asked to end meanwhile.
            if self.is_ending or not self.launcher.start(job, self.arguments_of(job), running):
                queue.insert(0, job)
                return
            running.append(job)
            job.starts += 1
            job.state = RUNNING
            job.reported_at = time.monotonic()
            self._print_start(job)
            self.write()

    def _record_end(self, job: Job, code: int) -> None:
        """Record how a job's process ended."""
        self._ranking = None
        if self.signals and code in _STOPPED_CODES and not holds_run(job.run_dir):
            job.state = NOT_STARTED  # it was stopped before it had written anything
        else:
            job.end(code)

    def _starts_again(self, job: Job, code: int) -> bool:
        """Return whether a job that was lost is started again, and say so."""
        is_lost = code < 0 or code in _RETRYABLE_CODES
        if not is_lost or job.starts > self.settings.retries or self.signals:
            return False
        print(one_line(f"job {job.number} starts again: {job.reason}"), flush=True)
        return True

    def _done(self) -> int:
        # A preempted job is not done: it goes on with the sweep.
        done = 0
        for job in self.jobs:
            if job.state not in (NOT_STARTED, RUNNING, "preempted"):
                done += 1
        return done

    def _print_start(self, job: Job) -> None:
        pairs = job.assignments({key: key for key in self.varied})
        again = f" (start {job.starts})" if job.starts > 1 else ""
        line = one_line(f"{' '.join(pairs)}  ->  {job.run_dir}{again}")
        print(f"[{self.jobs.index(job) + 1}/{self.count}] {line}", flush=True)

    def _print_end(self, job: Job, seconds_per_job: float) -> None:
        """Print how a job ended and how the sweep stands."""
        ranking = self.ranking
        end = f"job {job.number} {job.state}"
        value = ranking.value(job)
        if value is not None:
            end += f" {ranking.name} {value:.4f}"
        if job.failed:
            end += f": {job.reason}"
        done = self._done()
        facts = [one_line(end), f"{done} of {self.count} done"]
        compared = ranking.compared()
        if compared:
            best, best_value = compared[0]
            facts.append(f"best {ranking.name} {best_value:.4f} (job {best.number})")
        left = self.count - done
        if left and not self.is_ending:
            time_left = timedelta(seconds=round(seconds_per_job * left))
            facts.append(f"about {time_left} left")
        print("; ".join(facts), flush=True)

    def write(self) -> None:
        """Write the leaderboard as it stands, and show the jobs in TensorBoard."""
        with suppress(OSError):  # a dashboard must not end a sweep
            leaderboard.link_jobs(self.folder, self.jobs, self.varied)
        try:
            leaderboard.write_csv(self.folder, self.ranking, self.group_by, self.count)
        except StorageError as error:  # the running jobs are not affected
            if str(error) not in self._warnings:
                logger.warning("warning: %s", error)
            self._warnings.add(str(error))

    def close(self) -> int:
        """Print the table, draw the report and return the exit code."""
        self.write()
        leaderboard.show(self.folder, self.ranking, self.group_by, self.varied)
        if self.settings.report and not self.signals:
            # Folds and what is averaged over are no scales: no line leads from one to the next.
            no_scales = {"data.fold", *self.group_by}
            scales = [key for key in self.varied if key not in no_scales]
            write_report(self.folder, self.ranking, scales)
        if self.is_ending:
            why = "interrupted" if self.signals else "sweep.fail_fast ended it"
            print(f"{why}; go on with the sweep: {self._resume_command()}")
        return self._exit_code()

    def _resume_command(self) -> str:
        """Return the command line of this sweep, with its folder and `resume=auto`."""
        replaced = ["run_dir"]
        added = [run_dir_override(self.folder)]
        if self.config["resume"] in (None, "auto"):  # else the checkpoint from which jobs begin
            replaced.append("resume")
            added.insert(0, "resume=auto")
        kept = [text for text in self.arguments.overrides if key_of(text) not in replaced]
        return shlex.join(["train", "-m", *flags(self.arguments), *kept, *added])

    def _exit_code(self) -> int:
        """Return the code of the signal that ended the sweep, or of the first job that failed."""
        if self.signals:
            return 130 if self.signals[0] == signal.SIGINT else 143
        for job in self.jobs:
            if job.code:
                return job.code
        return 0


def say_progress(job: Job, metric: str) -> None:
    """Print now and then where a long job is."""
    if time.monotonic() - job.reported_at < _PROGRESS_SECONDS:
        return
    job.reported_at = time.monotonic()
    values = dict[str, Any]()  # the last of each name: a line of the log has only some of them
    for line in read_metrics(job.run_dir, _TAIL_BYTES):
        values |= line
    if not values:
        return
    epochs = (job.config.get("trainer") or {}).get("max_epochs")
    text = f"job {job.number}: epoch {values.get('epoch')} of {epochs}, step {values.get('step')}"
    if metric in values:
        text += f", {metric} {values[metric]}"
    print(text, flush=True)


def flags(arguments: Arguments) -> list[str]:
    """Return the flags of a command line that affect how its overrides are composed."""
    words = []
    if arguments.config_name != PRIMARY:
        words.append(f"--config-name={arguments.config_name}")
    if arguments.config_path is not None:
        words.append(f"--config-path={arguments.config_path}")
    words += [f"--config-dir={folder}" for folder in arguments.config_dirs]
    words += [f"--allow-target={package}" for package in arguments.allow_targets]
    if arguments.allow_remote_code:
        words.append("--allow-remote-code")
    return words


def _find_sweep(config: Values) -> Path | None:
    """Return the folder of the sweep to go on with; None for a new sweep.

    Raises ConfigError if `run_dir` holds a run, or a sweep without `resume`.
    """
    if config["run_dir"] is None:
        if config["resume"] == "auto":
            return newest_unfinished(_sweeps(config))
        return None
    folder = Path(config["run_dir"])
    check_run_dir(folder)
    holds_sweep = (folder / FILE).exists() or holds_run(folder / "0")
    if holds_run(folder) or (holds_sweep and config["resume"] is None):
        hint = "resume=auto goes on with it" if holds_sweep else "choose another run_dir"
        raise ConfigError("run_dir", f"{folder} holds a run or a sweep already", hint)
    return folder if holds_sweep else None


def _sweeps(config: Values) -> Path:
    return name_folder(RUNS, config["name"]) / "sweeps"


def newest_unfinished(sweeps: Path) -> Path | None:
    """Return the newest sweep in a folder with an unfinished job that no process holds."""

    def age_key(folder: Path) -> tuple[str, int, str]:
        # By length before the name: a `-10` comes after `-9`.
        return folder.name[:_STAMP_LENGTH], len(folder.name), folder.name

    folders = [file.parent for file in sweeps.glob(f"*/{FILE}")]
    for folder in sorted(folders, key=age_key, reverse=True):
        if _is_unfinished(folder) and not is_held(folder):
            return folder
    return None


def _is_unfinished(folder: Path) -> bool:
    """Return whether a job of a sweep is unfinished, by its leaderboard."""
    file = folder / FILE
    with suppress(OSError, ValueError, KeyError), file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
        return not rows or any(row["status"] not in ENDED_WELL for row in rows)
    return True  # unreadable: the status of each job decides


def job_folders(sweep: Path) -> dict[tuple[str, ...], Path]:
    """Return the folder of each job, by the identity of the overrides that it was made with."""
    numbered = [p for p in sweep.iterdir() if p.name.isdecimal() and not p.is_symlink()]
    folders = dict[tuple[str, ...], Path]()
    for path in sorted(numbered, key=lambda path: int(path.name)):
        # A folder that cannot be read belongs to no job.
        with suppress(OSError, ValueError, TypeError, ConfigError):
            texts = read_run_yaml(path / OVERRIDES)
            folders.setdefault(identity(map(str, texts)), path)
    return folders


def has_finished(folder: Path | None, config: Values) -> bool:
    """Return whether a folder holds a run that has finished with this configuration."""
    if folder is None:
        return False
    # A run whose files cannot be read is started again, and reports what is wrong.
    with suppress(OSError, ValueError, ConfigError):
        if read_status(folder).get("state") not in ENDED_WELL:
            return False
        saved = read_run_yaml(folder / CONFIG)
        if not isinstance(saved, dict):
            return False
        name_strategy_class(saved)  # older runs have stored the short name
        ignored = dict.fromkeys((*START_KEYS, "tags"))
        return (saved | ignored) == (config | ignored)
    return False
