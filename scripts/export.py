"""`regimen export run=RUN_DIR format=onnx`: a trained model as a file for other programs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.cli.shadow import refuse_shadows

_HELP = """\
Write a trained model as a file that other programs load; it is verified before it has its name.

  regimen export run=RUN_DIR format=onnx|torch_export|torchscript|aoti|safetensors [key=value ...]

  out            a folder; default: RUN_DIR/exports/FORMAT. It holds the model, export.json
                 (classes, transforms, provenance, what was verified) and card.md
  preprocessing  outside (default): floats in, logits out. inside: bytes in, probabilities out
  checkpoint     best (default), last, or a path
  overwrite      true replaces a folder that exists
"""
_KEYS = ("run", "format", "out", "preprocessing", "checkpoint", "overwrite")


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = export(sys.argv[1:])


def export(argv: Sequence[str]) -> int:
    """Do what a command line asks for."""
    from scripts.cli.arguments import parse_arguments
    from scripts.cli.console import importing, log_to_stderr
    from scripts.cli.first_line import greet

    arguments = parse_arguments(argv)
    if arguments.help:
        print(_HELP, end="")
        return 0
    greet("cpu")
    log_to_stderr(verbose=True)
    values = _values(arguments.overrides)
    with importing():
        from trainer.export.artefact import WEIGHTS, export_run, formats, how_to_load
        from trainer.inference.run import load_run

    _check(values, formats())
    run = load_run(values["run"], "cpu", arguments.allow_targets)
    made = export_run(
        run,
        values["format"],
        Path(values["out"]) if "out" in values else None,
        values.get("preprocessing", "outside"),
        values.get("checkpoint", "best"),
        values.get("overwrite") == "true",
    )
    if made.remark:
        print(f"note: {made.remark}", file=sys.stderr)
    if values["format"] == WEIGHTS:
        print(*how_to_load(made.folder), sep="\n")
    print(f"written to {made.file} (largest difference to the model: {made.difference:.2g})")
    return 0


def _values(overrides: Sequence[str]) -> dict[str, Any]:
    from conf.errors import raise_problems
    from scripts.cli.arguments import only_keys

    usage = "regimen export run=RUN_DIR format=onnx"
    values, problems = only_keys("export", overrides, _KEYS, usage)
    raise_problems(problems)
    return values


def _check(values: dict[str, Any], formats: Sequence[str]) -> None:
    from conf.errors import raise_problems
    from scripts.cli.arguments import choice_problems

    allowed = {
        "format": formats,
        "preprocessing": ("outside", "inside"),
        "overwrite": ("true", "false"),
    }
    raise_problems(choice_problems(values, allowed, required="format"))


if __name__ == "__main__":
    main()
