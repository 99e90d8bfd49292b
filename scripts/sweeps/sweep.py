"""The jobs of a sweep, one after the other, in one folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import PRIMARY, Arguments
from scripts.composition.overrides import Swept
from scripts.sweeps.leaderboard import FILE, Ranking, show, write_csv
from scripts.sweeps.process import Outcome, Stop, command, run_job
from trainer.runs.directory import name_folder, reserve, timestamp
from trainer.runs.status import check_run_dir, holds_run

RUNS = Path("runs")


@dataclass(slots=True)
class Sweep:
    """A folder of jobs, and how those that ran have ended."""

    arguments: Arguments
    config: dict[str, Any]  # of the first job: the metric that all are compared by
    folder: Path
    count: int
    outcomes: list[Outcome] = field(default_factory=list)
    stop: Stop = field(default_factory=Stop)

    def plan(self, job: Sequence[Swept]) -> Outcome:
        """Give the next number to a job."""
        number = len(self.outcomes)
        values = {override.key: override.value for override in job if override.key != "run_dir"}
        self.outcomes.append(Outcome(number, self.folder / str(number), values))
        return self.outcomes[-1]

    def run(self, outcome: Outcome, job: Sequence[Swept]) -> None:
        """Run a job to its end, and write the leaderboard as it stands then."""
        varied = " ".join(override.text for override in job if override.varies)
        title = f"[{outcome.number + 1}/{self.count}] {varied}"
        print(f"\n{title}  ->  {outcome.run_dir}", flush=True)
        texts = [override.text for override in job if override.key != "run_dir"]
        run_job(outcome, command(_flags(self.arguments), texts, outcome.run_dir), self.stop)
        write_csv(self.folder, self.outcomes, self.ranking)

    @property
    def ranking(self) -> Ranking:
        """Return how the jobs compare, by what is known so far."""
        return Ranking(self.config, self.outcomes)

    def close(self, varied: Sequence[str]) -> int:
        """Print the table and return the exit code."""
        show(self.folder, self.outcomes, self.ranking, varied)
        if self.stop.number is not None:
            return self.stop.code
        return next((outcome.code for outcome in self.outcomes if outcome.code), 0)


def sweep_folder(config: dict[str, Any]) -> Path:
    """Make the sweep's folder: `run_dir`, or a new one under `runs/<name>/sweeps`."""
    if config["run_dir"] is None:
        return reserve(name_folder(RUNS, config["name"]) / "sweeps", timestamp())
    folder = Path(config["run_dir"])
    check_run_dir(folder)
    used = holds_run(folder) or (folder / FILE).exists() or holds_run(folder / "0")
    if used and config["resume"] is None:
        message = f"{folder} holds a run or a sweep already"
        raise ConfigError(Problem("run_dir", message, hint="resume=auto goes on with it"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(Problem("run_dir", f"{folder}: {error.strerror}")) from error
    return folder


def _flags(arguments: Arguments) -> list[str]:
    flags = []
    if arguments.config_name != PRIMARY:
        flags += ["--config-name", arguments.config_name]
    if arguments.config_path is not None:
        flags += ["--config-path", arguments.config_path]
    for folder in arguments.config_dirs:
        flags += ["--config-dir", folder]
    for package in arguments.allow_targets:
        flags += ["--allow-target", package]
    return flags
