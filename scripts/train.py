"""`train experiment=resnet18 [key=value ...]`: train, or with -m sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from scripts.shadow import clashes, refuse_shadows

refuse_shadows()  # before anything of ours is imported from where another package stands

from scripts.arguments import parse_arguments  # noqa: E402
from scripts.compose import Composed, compose  # noqa: E402
from scripts.console import guarded, log_to_stderr, logger  # noqa: E402
from scripts.help import answer  # noqa: E402
from scripts.request import Request  # noqa: E402


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    guarded(lambda: train(sys.argv[1:]))


def train(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys and types are sound."""
    arguments = parse_arguments(argv)
    if answer(arguments):
        return 0
    log_to_stderr(os.environ.get("RANK", "0") == "0")
    if arguments.multirun:
        from scripts.sweep import sweep

        return sweep(arguments)
    composed = compose(arguments)
    for clash in clashes():
        logger.warning("warning: %s", clash)
    return _start(composed, list(argv))


def _start(composed: Composed, argv: list[str]) -> int:
    """Train in this process, or in as many as the strategy asks for."""
    request = Request(
        composed.config,
        composed.overrides,
        {name: str(choice) for name, choice in composed.choices.items()},
        argv,
        list(composed.arguments.allow_targets),
    )
    if _is_group(composed) and "RANK" not in os.environ:
        from scripts.launch import launch

        return launch(request)
    from scripts.run import run

    return run(request)


def _is_group(composed: Composed) -> bool:
    strategy = composed.config["strategy"]["name"]
    return strategy in ("ddp", "fsdp") and not composed.config["dry_run"]


if __name__ == "__main__":
    main()
