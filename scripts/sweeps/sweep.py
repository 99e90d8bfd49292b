"""The jobs of a sweep and how they ended, in one folder."""

import itertools
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.check import parse
from conf.schema import SweepConfig
from scripts.cli.arguments import PRIMARY, Arguments
from scripts.cli.console import logger
from scripts.cli.request import run_dir_override
from scripts.composition.identity import belongs_outside, identity
from scripts.composition.overrides import Swept
from scripts.sweeps import dashboard
from scripts.sweeps.folder import find_sweep, has_finished, hold_folder, job_folders
from scripts.sweeps.groups import Groups, group_keys
from scripts.sweeps.launchers.choice import launcher_for
from scripts.sweeps.launchers.launcher import Launcher
from scripts.sweeps.launchers.server import Server
from scripts.sweeps.leaderboard import show, write_csv
from scripts.sweeps.process import Outcome, Stop, note_outcome, words
from scripts.sweeps.ranking import Ranking
from trainer.errors import StorageError
from trainer.files.layout import columns_of, folded_command
from trainer.files.log_format import on_one_line
from trainer.runs.dashboard import sweep_command
from trainer.runs.status import holds_run

Job = Sequence[Swept]


@dataclass(slots=True)
class Sweep:
    """A folder of jobs, and how those that ran have ended.

    A job is known by its overrides; its number is the name of its folder.
    """

    arguments: Arguments
    config: dict[str, Any]  # of the first job; it has the metric by which all are compared
    varied: Sequence[str]  # keys
    count: int  # jobs, including those that are not known yet
    metric: str | None = None  # of the task, if it is known
    expected: str | None = None  # as long as no job has a result
    settings: SweepConfig = field(init=False)
    group_by: Sequence[str] = field(init=False)
    found: Path | None = field(init=False)  # the sweep to go on with
    folder: Path = field(init=False)
    known: dict[tuple[str, ...], Path] = field(init=False)
    taken: set[str] = field(init=False)  # names of folders
    running: set[int] = field(default_factory=set)  # numbers of jobs
    planned: dict[tuple[str, ...], Outcome] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)
    complaints: set[str] = field(default_factory=set)  # about the leaderboard's file
    server: Server = field(default_factory=Server)
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.settings = parse(self.config).sweep or SweepConfig()
        self.launcher = launcher_for(self.settings, self.server)
        self.group_by = group_keys(self.settings.group_by, self.varied)
        self.found = find_sweep(self.config)
        self.known = job_folders(self.found) if self.found else {}

    def is_done(self, job: Job, config: dict[str, Any]) -> bool:
        """Return whether a job of an earlier start has finished."""
        folder = self.known.get(_identity(job))
        return folder is not None and has_finished(folder, config)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the sweep's folder, and record signals instead of ending at once."""
        self.folder, lock = hold_folder(self.config, self.found)
        self.taken = {path.name for path in self.folder.iterdir()}
        if self.settings.launcher != "local":
            self.server.close()  # it was needed for the checks only
        if self.found is not None:
            print(f"going on with the sweep {self.folder}", flush=True)
        dashboard.begin(self.folder, self.varied)
        typed = folded_command(sweep_command(self.folder), columns_of(sys.stdout))
        print("follow the sweep:", typed, sep="\n" if "\n" in typed else " ", flush=True)
        try:
            with self.stop.listening():
                yield
        finally:
            self.launcher.close()
            lock.release()

    def plan(self, job: Job, config: dict[str, Any], number: int | None = None) -> Outcome:
        """Give a job its folder, that of `number` or the next free one; a finished job is read."""
        name = _identity(job)
        if name in self.planned:
            self.count -= 1
            return self.planned[name]
        folder = self.known.get(name) if number is None else self.folder / str(number)
        folder = folder or self.folder / self._free_name()
        self.taken.add(folder.name)
        values = {o.key: o.value for o in job if not belongs_outside(o.key)}
        outcome = self.planned[name] = Outcome(int(folder.name), folder, values, config=config)
        if has_finished(folder, config):
            note_outcome(outcome, 0)
        return outcome

    def _free_name(self) -> str:
        names = map(str, itertools.count())
        return next(name for name in names if name not in self.taken)

    @property
    def outcomes(self) -> list[Outcome]:
        """Return all jobs that are known so far, in the order of the grid."""
        return list(self.planned.values())

    def words(self, outcome: Outcome, job: Job) -> list[str]:
        """Return the arguments of `train` for a job."""
        texts = [override.text for override in job if not _placed(override.key)] + outcome.more
        started = holds_run(outcome.run_dir)
        if started:
            texts.append("resume=auto")
        elif self.config["resume"] not in (None, "auto"):  # a checkpoint from which all jobs begin
            texts += [override.text for override in job if override.key == "resume"]
        return words(flags(self.arguments), texts, outcome.run_dir)

    @property
    def ended(self) -> bool:
        """Return whether no further job starts: after a signal, or a failure with `fail_fast`."""
        failed = any(outcome.failed for outcome in self.outcomes)
        return self.stop.number is not None or (self.settings.fail_fast and failed)

    def write(self) -> None:
        """Write the leaderboard as it stands, and show the jobs in TensorBoard."""
        dashboard.arrange(self.folder, self.outcomes, self.varied)
        self.write_leaderboard()

    def write_leaderboard(self) -> None:
        """Write `leaderboard.csv` as it stands."""
        board = self.ranking, self.groups, self.count, self.running
        try:
            write_csv(self.folder, self.outcomes, *board)
        except StorageError as error:  # the running jobs are not affected
            if str(error) not in self.complaints:
                logger.warning("warning: %s", error)
            self.complaints.add(str(error))

    @property
    def groups(self) -> Groups:
        """Return the statistics of the jobs that differ in `sweep.group_by` only."""
        return Groups(self.group_by, self.outcomes, self.ranking)

    @property
    def ranking(self) -> Ranking:
        """Return how the jobs compare, by what is known so far."""
        return Ranking(self.config, self.outcomes, self.metric, self.expected)

    def close(self) -> int:
        """Print the table and return the exit code."""
        self.write()
        show(self.folder, self.outcomes, self.ranking, self.groups, self.varied)
        if self.settings.report and self.stop.number is None:
            report(self.folder)
        if self.ended:
            why = "sweep.fail_fast ended it" if self.stop.number is None else "interrupted"
            print(f"{why}; go on with the sweep: {self._resume_command()}")
        if self.stop.number is not None:
            return self.stop.code
        return next((outcome.code for outcome in self.outcomes if outcome.code), 0)

    def _resume_command(self) -> str:
        kept = [t for t in self.arguments.overrides if _key(t) != "run_dir"]
        if self.config["resume"] in (None, "auto"):
            kept = [*(t for t in kept if _key(t) != "resume"), "resume=auto"]
        words = [*flags(self.arguments), *kept, run_dir_override(self.folder)]
        return shlex.join(["train", "-m", *words])


def report(folder: Path) -> None:
    """Write the report in a separate process: drawing takes memory, and may fail."""
    argv = [sys.executable, "-P", "-m", "scripts.sweeps.report", str(folder)]
    done = subprocess.run([*argv, "--quiet"], capture_output=True, text=True, errors="replace")
    print(done.stdout, end="")
    if done.returncode:
        why = (done.stderr.splitlines() or [f"exit {done.returncode}"])[-1]
        command = shlex.join(["regimen", "report", str(folder)])
        print(on_one_line(f"no report ({why}); try again: {command}"))


def flags(arguments: Arguments) -> list[str]:
    """Return the flags that a command line of ours has besides its overrides."""
    found = []
    if arguments.config_name != PRIMARY:
        found += ["--config-name", arguments.config_name]
    if arguments.config_path is not None:
        found += ["--config-path", arguments.config_path]
    for folder in arguments.config_dirs:
        found += ["--config-dir", folder]
    for package in arguments.allow_targets:
        found += ["--allow-target", package]
    return found


def _identity(job: Job) -> tuple[str, ...]:
    return identity(override.text for override in job)


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _placed(key: str) -> bool:
    """Return whether the sweep, not the command line, sets a key of its jobs."""
    return belongs_outside(key) and key != "resume_policy"
