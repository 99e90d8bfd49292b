"""`train -m key=a,b ...`: one job for each combination, each in a process of its own."""

from scripts.cli.arguments import Arguments
from scripts.composition.compose import split_jobs
from scripts.composition.identity import distinct
from scripts.sweeps.check import check_built, checked
from scripts.sweeps.search import search
from scripts.sweeps.sweep import Sweep


def sweep(arguments: Arguments) -> int:
    """Run every job, one after the other, and return the first failed one's exit code.

    Nothing starts before all jobs have been checked. What has finished is not run again.
    """
    if any(text.lstrip("+").startswith("sweep=") for text in arguments.overrides):
        return search(arguments)
    jobs = distinct(split_jobs(arguments))
    configs = checked(arguments, jobs)
    varied = [override.key for override in jobs[0] if override.varies]
    it = Sweep(arguments, configs[0], varied, len(jobs))
    pairs = list(zip(jobs, configs, strict=True))
    check_built(arguments, [job for job, config in pairs if not it.is_done(job, config)])
    with it.held():
        planned = [(it.plan(job, config), job) for job, config in pairs]
        it.write()
        for outcome, job in planned:
            if not it.ended and outcome.state != "finished":
                it.run(outcome, job)
        return it.close()
