"""Hold configurations against torch and their targets: what `check` has done in a process.

It reads a JSON list of overrides for each job, and writes the mistakes, each once, and the metric
of the first job's task.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

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
    """Check every job of the list in one file, and write what is found into another."""
    *given, asked, answer = sys.argv[1:]
    arguments = parse_arguments(given)
    jobs = json.loads(Path(asked).read_text(encoding="utf-8"))
    found = [problem for job in jobs for problem in problems_of(arguments, job)]
    problems = [astuple(problem) for problem in dict.fromkeys(found)]
    monitor = monitor_of(arguments, jobs[0]) if jobs else None
    text = json.dumps({"problems": problems, "monitor": monitor})
    Path(answer).write_text(text, encoding="utf-8")
