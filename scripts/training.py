"""From the words of a command line to a run, a sweep, or an answer; torch comes last."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from scripts.cli.arguments import parse_arguments
from scripts.cli.console import importing, log_to_stderr, logger
from scripts.cli.request import Request
from scripts.cli.shadow import clashes
from scripts.composition.compose import Composed, compose
from scripts.help import answer


def train(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys and types are sound."""
    arguments = parse_arguments(argv)
    if answer(arguments):
        return 0
    log_to_stderr(os.environ.get("RANK", "0") == "0")
    if arguments.multirun:
        from scripts.sweeps.grid import sweep

        return sweep(arguments)
    composed = compose(arguments)
    for clash in clashes():
        logger.warning("warning: %s", clash)
    request = Request(
        composed.config,
        composed.overrides,
        {name: str(choice) for name, choice in composed.choices.items()},
        list(argv),
        list(composed.arguments.allow_targets),
    )
    with importing():
        start = _starter(composed)
    with composed.locating():
        return start(request)


def _starter(composed: Composed) -> Callable[[Request], int]:
    """Import what trains in this process, or in as many as the strategy asks for."""
    strategy = composed.config["strategy"]["name"]
    several = strategy in ("ddp", "fsdp") and not composed.config["dry_run"]
    if several and "RANK" not in os.environ:
        from scripts.launching.launch import launch

        return launch
    from scripts.runs.run import run

    return run
