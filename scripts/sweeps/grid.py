"""`train -m key=a,b ...`: one job for each combination, each in a process of its own."""

from scripts.cli.arguments import Arguments
from scripts.composition.compose import split_jobs
from scripts.composition.identity import distinct
from scripts.composition.kept import keeping_files
from scripts.sweeps.check import check_built, checked
from scripts.sweeps.jobs import run_jobs
from scripts.sweeps.launchers.choice import LAUNCHERS
from scripts.sweeps.launchers.warm import modules_of
from scripts.sweeps.process import NOT_STARTED
from scripts.sweeps.search import search
from scripts.sweeps.sweep import Sweep


def sweep(arguments: Arguments) -> int:
    """Run every job and return the first failed one's exit code.

    Nothing starts before all jobs have been checked. What has finished is not run again.
    """
    with keeping_files():
        if any(_searches(text) for text in arguments.overrides):
            return search(arguments)
        return _grid(arguments)


def _grid(arguments: Arguments) -> int:
    jobs = distinct(split_jobs(arguments))
    configs = checked(arguments, jobs)
    varied = [override.key for override in jobs[0] if override.varies]
    it = Sweep(arguments, configs[0], varied, len(jobs))
    pairs = list(zip(jobs, configs, strict=True))
    unfinished = [job for job, config in pairs if not it.is_done(job, config)]
    it.server.modules = modules_of(configs)
    if monitor := check_built(arguments, unfinished, it.server):
        it.expected = f"val/{monitor}"
    with it.held():
        planned = [(it.plan(job, config), job) for job, config in pairs]
        it.write()
        jobs_to_run = (pair for pair in planned if pair[0].state == NOT_STARTED)
        run_jobs(it, lambda: next(jobs_to_run, None))
        return it.close()


def _searches(text: str) -> bool:
    """Return whether an override chooses a search: the other sweeps say where jobs run."""
    key, _, choice = text.lstrip("+").partition("=")
    return key == "sweep" and choice not in (*LAUNCHERS, "null")
