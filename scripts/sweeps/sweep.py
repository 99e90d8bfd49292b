"""The jobs of a sweep, one after the other, in one folder."""

import itertools
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.check import parse
from conf.schema import SweepConfig
from scripts.cli.arguments import PRIMARY, Arguments
from scripts.cli.request import run_dir_override
from scripts.composition.identity import belongs_outside, identity
from scripts.composition.overrides import Swept
from scripts.sweeps import dashboard
from scripts.sweeps.folder import find_sweep, has_finished, hold_folder, job_folders
from scripts.sweeps.groups import Groups, group_keys
from scripts.sweeps.leaderboard import show, write_csv
from scripts.sweeps.process import Outcome, Stop, command, note_outcome, run_job
from scripts.sweeps.ranking import Ranking
from trainer.runs.dashboard import sweep_command
from trainer.runs.status import holds_run

Job = Sequence[Swept]


@dataclass(slots=True)
class Sweep:
    """A folder of jobs, and how those that ran have ended.

    A job is known by its overrides; its number is the name of its folder.
    """

    arguments: Arguments
    config: dict[str, Any]  # of the first job: the metric that all are compared by
    varied: Sequence[str]  # keys
    count: int  # jobs, those included that are not known yet
    settings: SweepConfig = field(init=False)
    group_by: Sequence[str] = field(init=False)
    found: Path | None = field(init=False)  # the sweep to go on with
    folder: Path = field(init=False)
    known: dict[tuple[str, ...], Path] = field(init=False)
    free: Iterator[int] = field(init=False)  # numbers of new folders
    planned: dict[tuple[str, ...], Outcome] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self.settings = parse(self.config).sweep or SweepConfig()
        self.group_by = group_keys(self.settings.group_by, self.varied)
        self.found = find_sweep(self.config)
        self.known = job_folders(self.found) if self.found else {}

    def is_done(self, job: Job, config: dict[str, Any]) -> bool:
        """Return whether a job of an earlier start has finished."""
        folder = self.known.get(_identity(job))
        return folder is not None and has_finished(folder, config)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the sweep's folder, and note signals instead of ending at once."""
        self.folder, lock = hold_folder(self.config, self.found)
        taken = {path.name for path in self.folder.iterdir()}
        self.free = (number for number in itertools.count() if str(number) not in taken)
        if self.found is not None:
            print(f"going on with the sweep {self.folder}", flush=True)
        dashboard.begin(self.folder, self.varied)
        print(f"follow the sweep: {sweep_command(self.folder)}", flush=True)
        try:
            with self.stop.listening():
                yield
        finally:
            lock.release()

    def plan(self, job: Job, config: dict[str, Any]) -> Outcome:
        """Give a job its folder, a new one the next free number; a finished job is read."""
        name = _identity(job)
        if name in self.planned:
            self.count -= 1
            return self.planned[name]
        done = self.is_done(job, config)
        folder = self.known.get(name) or self.folder / str(next(self.free))
        values = {o.key: o.value for o in job if not belongs_outside(o.key)}
        outcome = self.planned[name] = Outcome(int(folder.name), folder, values)
        if done:
            note_outcome(outcome, 0)
        return outcome

    @property
    def outcomes(self) -> list[Outcome]:
        """Return all jobs that are known so far, in the order of the grid."""
        return list(self.planned.values())

    def run(self, outcome: Outcome, job: Job) -> None:
        """Run a job to its end, and write the leaderboard as it stands then."""
        varied = " ".join(override.text for override in job if override.varies)
        place = self.outcomes.index(outcome) + 1
        print(f"\n[{place}/{self.count}] {varied}  ->  {outcome.run_dir}", flush=True)
        dashboard.link_started(self.folder, self.outcomes, outcome, self.varied)
        run_job(outcome, self._command(outcome, job), self.stop)
        self.write()

    def _command(self, outcome: Outcome, job: Job) -> list[str]:
        texts = [override.text for override in job if not _placed(override.key)]
        started = holds_run(outcome.run_dir)
        if started:
            texts.append("resume=auto")
        elif self.config["resume"] not in (None, "auto"):  # a checkpoint that all jobs begin from
            texts += [override.text for override in job if override.key == "resume"]
        return command(flags(self.arguments), texts, outcome.run_dir)

    @property
    def ended(self) -> bool:
        """Return whether no further job is to start: after a signal, or a failure if so asked."""
        failed = any(outcome.failed for outcome in self.outcomes)
        return self.stop.number is not None or (self.settings.fail_fast and failed)

    def write(self) -> None:
        """Write the leaderboard as it stands, and show the jobs in TensorBoard."""
        dashboard.arrange(self.folder, self.outcomes, self.varied)
        write_csv(self.folder, self.outcomes, self.ranking, self.groups, self.count)

    @property
    def groups(self) -> Groups:
        """Return the statistics of the jobs that differ in `sweep.group_by` only."""
        return Groups(self.group_by, self.outcomes, self.ranking)

    @property
    def ranking(self) -> Ranking:
        """Return how the jobs compare, by what is known so far."""
        return Ranking(self.config, self.outcomes)

    def close(self) -> int:
        """Print the table and return the exit code."""
        self.write()
        show(self.folder, self.outcomes, self.ranking, self.groups, self.varied)
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
    """Return whether the sweep decides about a key of its jobs."""
    return belongs_outside(key) and key != "resume_policy"
