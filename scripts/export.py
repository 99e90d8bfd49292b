"""`regimen export run=RUN_DIR format=onnx`: a trained model as a file for other programs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from conf.errors import raise_problems
from scripts.cli.arguments import parse_or_help
from scripts.cli.console import importing, log_to_stderr
from scripts.cli.keys import Take, one_of, only_keys, true_or_false
from scripts.cli.output import greet

_HELP = """\
Write a trained model as a file that other programs load; it is verified before it has its name.

  regimen export run=RUN_DIR format=onnx|torch_export|torchscript|aoti|safetensors [key=value ...]

  out            a folder; default: RUN_DIR/exports/FORMAT. It holds the model, export.json
                 (classes, transforms, provenance, what was verified) and card.md
  preprocessing  outside (default): floats in, logits out. inside: bytes in, probabilities out
  checkpoint     best (default), last, or a path
  overwrite      true replaces a folder that exists
"""
FORMATS = ("onnx", "torch_export", "torchscript", "aoti", "safetensors")


def export(argv: Sequence[str]) -> int:
    """Do what a command line asks for."""
    if (arguments := parse_or_help(argv, _HELP)) is None:
        return 0
    greet("cpu")
    log_to_stderr(verbose=True)
    keys: dict[str, Take] = {
        "run": str,
        "format": one_of(*FORMATS),
        "out": Path,
        "preprocessing": one_of("outside", "inside"),
        "checkpoint": str,
        "overwrite": true_or_false,
    }
    required = {"run": "regimen export run=RUN_DIR", "format": f"one of {', '.join(FORMATS)}"}
    values, problems = only_keys("export", arguments.overrides, keys, required)
    raise_problems(problems)
    with importing():
        from trainer.export.artefact import export_run
        from trainer.inference.run import load_run

    run = load_run(values.pop("run"), "cpu", arguments.allow_targets)
    made = export_run(run, values.pop("format"), **values)
    if made.remark:
        print(f"note: {made.remark}", file=sys.stderr)
    print(*made.lines, sep="\n")
    print(f"written to {made.file} (largest difference to the model: {made.difference:.2g})")
    return 0
