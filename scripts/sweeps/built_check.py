"""Hold configurations against torch and their targets: the process that `check` starts.

It reads a JSON list of overrides for each job, and prints the mistakes, each once, and the metric
of the first job's task.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import astuple, replace

from conf.check import parse
from conf.errors import ConfigError, Problem
from scripts.cli.arguments import Arguments, parse_arguments
from scripts.composition.compose import compose
from trainer.build.check import check_targets, stand_ins


def problems_of(arguments: Arguments, overrides: Sequence[str]) -> list[Problem]:
    """Return the mistakes of one job; what is no mistake of its configuration is left to it."""
    try:
        composed = compose(replace(arguments, overrides=tuple(overrides)))
        with composed.locating():
            check_targets(parse(composed.config))
    except ConfigError as error:
        return error.problems
    except Exception:
        return []
    return []


def monitor_of(arguments: Arguments, overrides: Sequence[str]) -> str | None:
    """Return the metric of a job's task; None if there is none, or it cannot be told."""
    try:
        composed = compose(replace(arguments, overrides=tuple(overrides)))
        return stand_ins(parse(composed.config)).task.monitor()
    except Exception:
        return None


def main() -> None:
    """Check every job of the list on stdin."""
    arguments = parse_arguments(sys.argv[1:])
    with redirect_stdout(sys.stderr):  # of the user's modules
        jobs = json.load(sys.stdin)
        found = [p for job in jobs for p in problems_of(arguments, job)]
        monitor = monitor_of(arguments, jobs[0]) if jobs else None
    problems = [astuple(problem) for problem in dict.fromkeys(found)]
    print(json.dumps({"problems": problems, "monitor": monitor}))


if __name__ == "__main__":
    main()
