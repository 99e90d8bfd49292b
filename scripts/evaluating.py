"""Test a finished run again: the words of `evaluate`'s command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem, one_line
from scripts.cli.arguments import Arguments, of_run, parse_arguments
from scripts.cli.console import log_to_stderr
from scripts.composition.compose import compose

_OWN = ("run", "checkpoint", "split")
_HELP = """\
Test a run's checkpoint again, on one device, and write evaluation.json into its directory.

  evaluate run=RUN_DIR [checkpoint=best|last|PATH] [split=test|val] [key=value ...]

Further overrides change the run's configuration, e.g. loader.num_workers=2 or data.root=DIR.
"""


def evaluate(argv: Sequence[str]) -> int:
    """Compute the metrics of one split with one checkpoint, print them and keep them."""
    arguments = parse_arguments(argv)
    if arguments.help:
        print(_HELP, end="")
        return 0
    log_to_stderr(verbose=True)
    own, overrides = _taken_apart(arguments)
    run_dir = Path(own["run"])
    composed = compose(of_run(arguments, own["run"], overrides))
    from scripts.testing import test_again

    with composed.locating():
        metrics = test_again(
            composed.config, run_dir, own["checkpoint"], own["split"], arguments.allow_targets
        )
    _show(run_dir, own, metrics)
    return 0


def _taken_apart(arguments: Arguments) -> tuple[dict[str, str], list[str]]:
    own = {"checkpoint": "best", "split": "test"}
    overrides = []
    for override in arguments.overrides:
        name, equals, value = override.partition("=")
        if equals and name in _OWN:
            own[name] = value
        else:
            overrides.append(override)
    problems = []
    if not own.get("run"):
        problems.append(Problem("run", "missing: evaluate run=RUN_DIR"))
    elif not (Path(own["run"]) / "config.yaml").is_file():
        problems.append(Problem("run", f"{own['run']} holds no run: it has no config.yaml"))
    if own["split"] not in ("test", "val"):
        problems.append(Problem("split", f"{own['split']!r} is neither test nor val"))
    if problems:
        raise ConfigError(problems)
    return own, overrides


def _show(run_dir: Path, own: dict[str, str], metrics: dict[str, float]) -> None:
    from trainer.files.atomic import write_text

    result: dict[str, Any] = {"checkpoint": own["checkpoint"], "split": own["split"], **metrics}
    write_text(run_dir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    for name, value in metrics.items():
        print(f"{one_line(name):<20} {value:.4f}")
    print(f"written to {one_line(str(run_dir / 'evaluation.json'))}")
