"""`train -m key=a,b ...`: one job for each combination, each in a process of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.arguments import PRIMARY, Arguments
from scripts.compose import compose, split_jobs
from scripts.leaderboard import FILE, Ranking, show, write_csv
from scripts.overrides import Swept
from scripts.sweep_job import Outcome, Stop, command, run_job
from trainer.run_directory import holds_run, name_folder, reserve, timestamp

RUNS = Path("runs")


def sweep(arguments: Arguments) -> int:
    """Run every job, one after the other, and return the first failed one's exit code.

    Nothing starts before the configurations of all jobs have been composed and checked.
    """
    jobs = split_jobs(arguments)
    configs = _checked(arguments, jobs)
    folder = _folder(configs[0])
    outcomes = [_outcome(folder, number, job) for number, job in enumerate(jobs)]
    varied = [override.key for override in jobs[0] if override.varies]
    stop = Stop()
    for outcome, job in zip(outcomes, jobs, strict=True):
        _announce(outcome, len(jobs), job)
        texts = [override.text for override in job if override.key != "run_dir"]
        run_job(outcome, command(_flags(arguments), texts, outcome.run_dir), stop)
        write_csv(folder, outcomes, Ranking(configs[0], outcomes))
        if stop.number is not None:
            break
    show(folder, outcomes, Ranking(configs[0], outcomes), varied)
    if stop.number is not None:
        return stop.code
    return next((outcome.code for outcome in outcomes if outcome.code), 0)


def _checked(arguments: Arguments, jobs: Sequence[Sequence[Swept]]) -> list[dict[str, Any]]:
    """Compose every job; raises ConfigError with the mistakes of all, each once."""
    configs, problems = [], []
    for job in jobs:
        overrides = tuple(override.text for override in job)
        try:
            composed = compose(replace(arguments, overrides=overrides, multirun=False))
            configs.append(composed.config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return configs


def _folder(config: dict[str, Any]) -> Path:
    """Make the sweep's folder: `run_dir`, or a new one under `runs/<name>/sweeps`."""
    if config["run_dir"] is None:
        return reserve(name_folder(RUNS, config["name"]) / "sweeps", timestamp())
    folder = Path(config["run_dir"])
    used = holds_run(folder) or (folder / FILE).exists() or holds_run(folder / "0")
    if used and config["resume"] is None:
        message = f"{folder} holds a run or a sweep already"
        raise ConfigError([Problem("run_dir", message, hint="resume=auto goes on with it")])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run_dir", f"{folder}: {error.strerror}")]) from error
    return folder


def _outcome(folder: Path, number: int, job: Sequence[Swept]) -> Outcome:
    overrides = {override.key: override.value for override in job if override.key != "run_dir"}
    return Outcome(number, folder / str(number), overrides)


def _announce(outcome: Outcome, count: int, job: Sequence[Swept]) -> None:
    varied = " ".join(override.text for override in job if override.varies)
    print(f"\n[{outcome.number + 1}/{count}] {varied}  ->  {outcome.run_dir}", flush=True)


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
