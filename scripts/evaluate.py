"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.cli.shadow import refuse_shadows

_OWN = ("run", "checkpoint", "split")
_HELP = """\
Test a run's checkpoint again, on one device, and write evaluation.json into its directory.

  evaluate run=RUN_DIR [checkpoint=best|last|PATH] [split=test|val] [key=value ...]

Further overrides change the run's configuration, e.g. loader.num_workers=2 or data.root=DIR.
"""


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = evaluate(sys.argv[1:])


def evaluate(argv: Sequence[str]) -> int:
    """Compute the metrics of one split with one checkpoint, print them and keep them."""
    from conf.check import parse
    from scripts.cli.arguments import of_run, parse_arguments
    from scripts.cli.console import importing, log_to_stderr
    from scripts.composition.compose import compose

    arguments = parse_arguments(argv)
    if arguments.help:
        print(_HELP, end="")
        return 0
    log_to_stderr(verbose=True)
    own, overrides = _taken_apart(arguments.overrides)
    run_dir = Path(own["run"])
    composed = compose(of_run(arguments, own["run"], overrides))
    with importing():
        from trainer.build.check import check_targets
        from trainer.inference.evaluation import evaluate_run
        from trainer.targets.allow_list import allow

    with composed.locating():
        allow(arguments.allow_targets)
        config = parse(composed.config)
        check_targets(config)
        metrics = evaluate_run(config, run_dir, own["checkpoint"], own["split"])
    _show(run_dir, own, metrics)
    return 0


def _taken_apart(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    from conf.errors import ConfigError, Problem
    from scripts.cli.arguments import own_keys, run_problems

    given, others = own_keys(overrides, _OWN)
    own = {"checkpoint": "best", "split": "test", **given}
    problems = run_problems(own.get("run"), "evaluate run=RUN_DIR")
    if own["split"] not in ("test", "val"):
        problems.append(Problem("split", f"{own['split']!r} is neither test nor val"))
    if problems:
        raise ConfigError(problems)
    return own, others


def _show(run_dir: Path, own: dict[str, str], metrics: dict[str, float]) -> None:
    from conf.errors import one_line
    from trainer.files.atomic import write_text

    result: dict[str, Any] = {"checkpoint": own["checkpoint"], "split": own["split"], **metrics}
    write_text(run_dir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    for name, value in metrics.items():
        print(f"{one_line(name):<20} {value:.4f}")
    print(f"written to {one_line(str(run_dir / 'evaluation.json'))}")


if __name__ == "__main__":
    main()
