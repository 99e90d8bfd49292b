"""Check the jobs of a sweep before the first starts: all are composed, some are built."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem, raise_problems
from scripts.cli.arguments import Arguments
from scripts.cli.console import logger
from scripts.composition.compose import compose
from scripts.composition.overrides import Swept
from scripts.sweeps.launchers.server import Server
from scripts.sweeps.sweep import flags


def checked(arguments: Arguments, jobs: Iterable[Sequence[Swept]]) -> list[dict[str, Any]]:
    """Compose every job; raises ConfigError with the mistakes of all, each once."""
    configs, problems = [], []
    for job in jobs:
        overrides = tuple(override.text for override in job)
        try:
            composed = compose(replace(arguments, overrides=overrides, multirun=False))
            configs.append(composed.config)
        except ConfigError as error:
            problems += error.problems
    raise_problems(problems)
    return configs


def check_built(
    arguments: Arguments, jobs: Sequence[Sequence[Swept]], server: Server, alone: bool = False
) -> str | None:
    """Find the mistakes for which torch and the targets must be imported, in one process.

    One job is checked for each combination of the swept values that are no numbers: groups and
    words. A single job checks itself, unless `alone` is true.
    Returns the metric of the first job's task, such as accuracy, if known. Raises ConfigError.
    """
    if len(jobs) < 2 and not alone:
        return None
    kinds = {
        tuple(o.text for o in job if o.varies and not _is_number(o.value)): job for job in jobs
    }
    logger.info("checking %d of %d jobs before the first starts", len(kinds), len(jobs))
    texts = [[override.text for override in job] for job in kinds.values()]
    try:
        found = _asked(arguments, texts, server)
        raise_problems(Problem(*fields) for fields in found["problems"])
    except BaseException:
        server.close()
        raise
    monitor: str | None = found["monitor"]
    return monitor


def _asked(arguments: Arguments, texts: list[list[str]], server: Server) -> dict[str, Any]:
    """Return the result of a process with torch; if it fails, each job reports its own mistakes."""
    with tempfile.TemporaryDirectory(prefix="regimen-") as folder:
        asked, answer = Path(folder, "jobs.json"), Path(folder, "found.json")
        asked.write_text(json.dumps(texts), encoding="utf-8")
        argv = [*flags(arguments), str(asked), str(answer)]
        call = "scripts.sweeps.built_check:main"
        server.start(0, call, argv, {}, Path(folder) / "said.txt")
        while not server.wait(60.0):
            pass
        found: dict[str, Any] = {"problems": [], "monitor": None}
        if answer.exists():
            found = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
