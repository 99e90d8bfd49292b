"""`train -m key=a,b ...`: one job for each combination, each in a process of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conf.errors import ConfigError
from scripts.cli.arguments import Arguments
from scripts.composition.compose import compose, split_jobs
from scripts.composition.overrides import Swept
from scripts.sweeps.search import search
from scripts.sweeps.sweep import Sweep, sweep_folder


def sweep(arguments: Arguments) -> int:
    """Run every job, one after the other, and return the first failed one's exit code.

    Nothing starts before the configurations of all jobs have been composed and checked.
    """
    if any(text.lstrip("+").startswith("sweep=") for text in arguments.overrides):
        return search(arguments)
    jobs = split_jobs(arguments)
    configs = _checked(arguments, jobs)
    it = Sweep(arguments, configs[0], sweep_folder(configs[0]), len(jobs))
    planned = [(it.plan(job), job) for job in jobs]
    for outcome, job in planned:
        if it.stop.number is None:
            it.run(outcome, job)
    return it.close([override.key for override in jobs[0] if override.varies])


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
