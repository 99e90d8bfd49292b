"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.cli.shadow import refuse_shadows

_OWN = ("run", "checkpoint", "split", "artefact", "allow_code")
_HELP = """\
Test a run's checkpoint again, on one device, and write evaluation.json into its directory.

  evaluate run=RUN_DIR [checkpoint=best|last|PATH] [split=test|val] [key=value ...]
  evaluate run=RUN_DIR artefact=FILE [split=test|val] [allow_code=true]

  artefact     a file that regimen export or quantize wrote, tested with the same metrics
  allow_code   true: load it even if its format runs code (torch_export, torchscript, aoti)

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
    from scripts.cli.arguments import of_run, parse_arguments
    from scripts.cli.console import importing, log_to_stderr
    from scripts.cli.first_line import asked_device, greet

    arguments = parse_arguments(argv)
    if arguments.help:
        print(_HELP, end="")
        return 0
    greet(asked_device(arguments.overrides))
    from conf.check import parse  # after the first line: these import Hydra
    from scripts.composition.compose import compose

    log_to_stderr(verbose=True)
    own, overrides = _taken_apart(arguments.overrides)
    run_dir = Path(own["run"])
    composed = compose(of_run(arguments, own["run"], overrides))
    with importing():
        from trainer.build.check import check_targets
        from trainer.targets.allow_list import allow

        measure = _measure_of(own)

    with composed.locating():
        allow(arguments.allow_targets)
        config = parse(composed.config)
        check_targets(config)
        metrics = measure(config)
    _show(run_dir, own, metrics)
    return 0


def _measure_of(own: dict[str, str]) -> Callable[[Any], dict[str, float]]:
    """Return what tests a checkpoint, or an exported file."""
    if "artefact" not in own:
        from trainer.inference.evaluation import evaluate_run

        return lambda config: evaluate_run(
            config, Path(own["run"]), own["checkpoint"], own["split"]
        )
    from trainer.export.evaluation import evaluate_artefact

    allowed = own.get("allow_code") == "true"
    return lambda config: evaluate_artefact(config, Path(own["artefact"]), own["split"], allowed)


def _taken_apart(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    from conf.errors import ConfigError, Problem
    from scripts.cli.arguments import own_keys, run_problems

    given, others = own_keys(overrides, _OWN)
    own = {"checkpoint": "best", "split": "test", **given}
    problems = run_problems(own.get("run"), "evaluate run=RUN_DIR")
    if own["split"] not in ("test", "val"):
        problems.append(Problem("split", f"{own['split']!r} is neither test nor val"))
    if "artefact" in given and "checkpoint" in given:
        message = "an exported file is tested, or a checkpoint: leave one of both out"
        problems.append(Problem("artefact", message))
    if own.get("allow_code", "false") not in ("true", "false"):
        problems.append(Problem("allow_code", f"is {own['allow_code']!r}: one of true, false"))
    if problems:
        raise ConfigError(problems)
    return own, others


def _show(run_dir: Path, own: dict[str, str], metrics: dict[str, float]) -> None:
    from conf.errors import one_line
    from trainer.files.atomic import write_text

    tested = "artefact" if "artefact" in own else "checkpoint"
    result: dict[str, Any] = {tested: own[tested], "split": own["split"], **metrics}
    write_text(run_dir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    for name, value in metrics.items():
        print(f"{one_line(name):<20} {value:.4f}")
    print(f"written to {one_line(str(run_dir / 'evaluation.json'))}")


if __name__ == "__main__":
    main()
