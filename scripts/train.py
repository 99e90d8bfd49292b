"""`train experiment=resnet18 [key=value ...]`: train, or with -m sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from scripts.compose import Composed, compose
from scripts.console import guarded, log_to_stderr


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    guarded(lambda: train(sys.argv[1:]))


def train(argv: Sequence[str]) -> int:
    """Do what a command line asks for; torch is imported once its keys and types are sound."""
    composed = compose(argv)
    return start(composed, list(argv))


def start(composed: Composed, arguments: list[str]) -> int:
    """Train in this process, or in as many as the strategy asks for."""
    log_to_stderr(os.environ.get("RANK", "0") == "0")
    from scripts.request import Request

    request = Request(
        composed.config,
        composed.overrides,
        {name: str(choice) for name, choice in composed.choices.items()},
        arguments,
        list(composed.arguments.allow_targets),
    )
    if _processes(composed.config) and "RANK" not in os.environ:
        from scripts.launch import launch

        return launch(request)
    from scripts.run import run

    return run(request)


def _processes(config: dict[str, object]) -> bool:
    strategy = config["strategy"]
    assert isinstance(strategy, dict)
    return strategy["name"] in ("ddp", "fsdp") and not config["dry_run"]


if __name__ == "__main__":
    main()
