"""Build the targets of configurations on stand-ins; `check` runs this in a process with torch.

The input is a JSON list with the overrides of each job. The output has all mistakes, each once, and
the metric of the first job's task.
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
    """Return the mistakes in a job's configuration; the job reports any other error itself."""
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
    """Return the metric of a job's task; None if it has none, or its task cannot be built."""
    try:
        composed = compose(replace(arguments, overrides=tuple(overrides)))
        return stand_ins(parse(composed.config)).task.monitor()
    except Exception:
        return None


def main() -> None:
    """Check every job of the list in one file, and write the result to another."""
    *given, asked, answer = sys.argv[1:]
    arguments = parse_arguments(given)
    jobs = json.loads(Path(asked).read_text(encoding="utf-8"))
    found = [problem for job in jobs for problem in problems_of(arguments, job)]
    problems = [astuple(problem) for problem in dict.fromkeys(found)]
    monitor = monitor_of(arguments, jobs[0]) if jobs else None
    text = json.dumps({"problems": problems, "monitor": monitor})
    Path(answer).write_text(text, encoding="utf-8")
