"""`evaluate run=RUN_DIR [checkpoint=best]`: test a finished run again."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.cli.shadow import refuse_shadows

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
    from scripts.cli.arguments import parse_or_help
    from scripts.cli.console import importing, log_to_stderr
    from scripts.cli.first_line import asked_device, greet
    from scripts.cli.keys import of_run

    if (arguments := parse_or_help(argv, _HELP)) is None:
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


def _measure_of(own: dict[str, Any]) -> Callable[[Any], dict[str, float]]:
    """Return what tests a checkpoint, or an exported file."""
    if "artefact" not in own:
        from trainer.inference.evaluation import evaluate_run

        return lambda config: evaluate_run(
            config, Path(own["run"]), own["checkpoint"], own["split"]
        )
    from trainer.export.evaluation import evaluate_artefact

    path, allowed = Path(own["artefact"]), own.get("allow_code", False)
    return lambda config: evaluate_artefact(config, path, own["split"], allowed)


def _taken_apart(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    from conf.errors import Problem, raise_problems
    from scripts.cli.keys import (
        Take,
        misspelt,
        one_of,
        own_keys,
        run_problems,
        taken,
        true_or_false,
    )

    keys: dict[str, Take] = {
        "run": str,
        "checkpoint": str,
        "split": one_of("test", "val"),
        "artefact": str,
        "allow_code": true_or_false,
    }
    given, others = own_keys(overrides, keys)
    own, problems = taken(given, keys)
    problems += misspelt(others, keys)
    problems += run_problems(given.get("run"))
    if not given.get("run"):
        problems.append(Problem("run", "missing: evaluate run=RUN_DIR"))
    if "artefact" in given and "checkpoint" in given:
        message = "an exported file is tested, or a checkpoint: leave one of both out"
        problems.append(Problem("artefact", message))
    raise_problems(problems)
    return {"checkpoint": "best", "split": "test", **own}, others


def _show(run_dir: Path, own: dict[str, Any], metrics: dict[str, float]) -> None:
    from conf.errors import one_line
    from trainer.files.atomic import write_text

    tested = "artefact" if "artefact" in own else "checkpoint"
    result: dict[str, Any] = {tested: own[tested], "split": own["split"], **metrics}
    for name, value in metrics.items():  # first: the directory may be another's, read-only
        print(f"{one_line(name):<20} {value:.4f}")
    write_text(run_dir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    print(f"written to {one_line(str(run_dir / 'evaluation.json'))}")


if __name__ == "__main__":
    main()
