"""`train -m key=a,b ...`: one job for each combination of values, each in its own process."""

import multiprocessing
import re
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from typing import Any

from regimen.callbacks.support import AUTO, Monitor
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, collect_problems, raise_problems
from regimen.scripts.cli.arguments import Arguments, key_of
from regimen.scripts.cli.console import logger
from regimen.scripts.composition.compose import compose, split_jobs
from regimen.scripts.composition.overrides import SweepOverride, refuse_outside
from regimen.scripts.sweeps.leaderboard import NOT_STARTED
from regimen.scripts.sweeps.sweep import Sweep, has_finished

_NUMBER = re.compile(r"[-+]?[\d.]+([eE][-+]?\d+)?")
_LAUNCHERS = ("local", "submitit", "ray", "null", "")  # choices of `sweep` that search nothing


def searches(arguments: Arguments) -> bool:
    """Return whether the overrides choose a search; other choices say where jobs run."""
    choice = ""
    for text in arguments.overrides:
        if key_of(text) == "sweep":
            choice = text.partition("=")[2]  # the last one counts
    return choice not in _LAUNCHERS


def sweep(arguments: Arguments) -> int:
    """Run every job and return the first failed one's exit code.

    Nothing starts before all jobs have been checked. Finished jobs are not run again.
    """
    jobs = split_jobs(arguments)
    varied = [override.key for override in jobs[0] if override.varies]
    refuse_outside(varied)
    configs = composed(arguments, jobs)
    if not varied:
        logger.warning("warning: nothing varies: this is one job; several: optimizer.lr=0.1,0.01")
    runner = Sweep(arguments, configs[0], varied, len(jobs))
    pairs = list(zip(jobs, configs, strict=True))
    unfinished = []
    for job, config in pairs:
        if not has_finished(runner.folder_of(job), config):
            unfinished.append(job)
    if len(unfinished) > 1:  # a single job checks itself
        runner.metric, runner.modes, runner.devices = check_built(arguments, unfinished)
    with runner.lock():
        planned = [runner.plan(job, config) for job, config in pairs]
        runner.write()
        to_run = (job for job in planned if job.state == NOT_STARTED)
        runner.run(lambda: next(to_run, None))
        return runner.close()


def composed(arguments: Arguments, jobs: Iterable[Sequence[SweepOverride]]) -> list[dict[str, Any]]:
    """Compose every job; raises ConfigError with the mistakes of all, each once."""
    configs = []
    errors = list[ConfigError]()
    for job in jobs:
        try:
            configs.append(compose(_arguments_of(arguments, job)).config)
        except ConfigError as error:
            errors.append(error)
    if errors:
        problems = list[Problem]()
        for mistake in errors:
            problems += mistake.problems
        combined = ConfigError(problems)
        combined.more = errors[0].more  # what all jobs have in common is checked once
        raise combined
    return configs


def check_built(
    arguments: Arguments, jobs: Sequence[Sequence[SweepOverride]]
) -> tuple[str | None, dict[str, str], tuple[str, list[str]]]:
    """Find the mistakes for which torch and the targets must be imported, in one process.

    One job is checked for each combination of the swept groups and words: jobs that differ in
    numbers only are checked once. Returns the metric of the first job's task, such as val/accuracy,
    if it is known; the modes of the task's metrics; what `regimen.trainer.device.visible` returns.
    Raises ConfigError.
    """
    distinct = dict[tuple[str, ...], Sequence[SweepOverride]]()
    for job in jobs:
        words = []
        for override in job:
            if override.varies and not _NUMBER.fullmatch(override.value):
                words.append(override.text)
        distinct[tuple(words)] = job
    logger.info("checking %d of %d jobs before the first starts", len(distinct), len(jobs))
    checked = [_arguments_of(arguments, job) for job in distinct.values()]
    # The process is spawned, and ends before the first job: this one holds no memory, no device and
    # no module of a user. It ignores Ctrl-C: the pool ends it.
    context = multiprocessing.get_context("spawn")
    ignore_interrupt = (signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessPoolExecutor(1, context, signal.signal, ignore_interrupt) as pool:
            problems, metric, modes, devices = pool.submit(built, checked).result()
    except BrokenProcessPool:  # each job reports its own mistakes
        return None, {}, ("", [])
    raise_problems(problems)
    return metric, modes, devices


def built(
    jobs: Sequence[Arguments],
) -> tuple[list[Problem], str | None, dict[str, str], tuple[str, list[str]]]:
    """Build the targets of configurations on stand-ins, for `check_built`.

    Returns their mistakes, the metric and the modes of the first one's task, and the accelerators.
    Other errors than mistakes are not returned: the job itself reports them.
    """
    from regimen.trainer.assembly.check import check_targets, placeholder_assembly
    from regimen.trainer.device import visible

    problems = list[Problem]()
    metric = None
    modes = dict[str, str]()
    for arguments in jobs:
        with suppress(Exception), collect_problems(problems):
            job = compose(arguments)
            with job.locating():
                config = parse(job.config)
                check_targets(config)
            if arguments is jobs[0]:
                task = placeholder_assembly(config).task
                modes |= task.modes()
                monitor = Monitor(AUTO, compared=False)
                monitor.resolve(task, config.data.validations)
                metric = monitor.name
    return problems, metric, modes, visible()


def _arguments_of(arguments: Arguments, job: Sequence[SweepOverride]) -> Arguments:
    return replace(arguments, overrides=tuple(o.text for o in job), multirun=False)
