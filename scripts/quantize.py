"""`regimen quantize run=RUN_DIR`: a trained model with 8-bit integers, as ONNX."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.cli.shadow import refuse_shadows

_HELP = """\
Write a trained model with 8-bit integers as ONNX: smaller, and faster on a CPU. It is compared with
the model before it has its name; what it gains and loses is printed.

  regimen quantize run=RUN_DIR [method=auto|static|dynamic] [key=value ...]

  method         static: weights and activations, for convolutions. dynamic: weights of matrix
                 products, for transformers. auto (default): static where most weights are of
                 convolutions
  samples        512; training samples that the ranges of static are taken from. A run that was
                 trained with callbacks=[default,qat] has its own
  max_drop       0.01; more accuracy lost on the test data is an error, and nothing is written
  out            a folder; default: RUN_DIR/exports/quantized. It holds the model, export.json and
                 card.md
  preprocessing  outside (default): floats in, logits out. inside: bytes in, probabilities out
  checkpoint     best (default), last, or a path
  overwrite      true replaces a folder that exists
"""
_KEYS = (
    "run",
    "method",
    "samples",
    "max_drop",
    "out",
    "preprocessing",
    "checkpoint",
    "overwrite",
)

_CHOICES = {
    "method": ("auto", "static", "dynamic"),
    "preprocessing": ("outside", "inside"),
    "overwrite": ("true", "false"),
}


def main() -> None:
    """Run the command line and leave with its exit code."""
    refuse_shadows()  # before anything of ours could be imported from where another package stands
    from scripts.cli.console import Command

    with Command() as command:
        command.code = quantize(sys.argv[1:])


def quantize(argv: Sequence[str]) -> int:
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
        from trainer.export.quantization import quantize_run
        from trainer.inference.run import load_run

    run = load_run(values.pop("run"), "cpu", arguments.allow_targets)
    made = quantize_run(run, **values)
    print(_table(made.before, made.after))
    ranges = ", ranges learnt in training" if made.learnt else ""
    print(f"written to {made.file} ({made.method}{ranges})")
    return 0


def _values(overrides: Sequence[str]) -> dict[str, Any]:
    from conf.errors import Problem, raise_problems
    from scripts.cli.arguments import choice_problems, only_keys

    usage = "regimen quantize run=RUN_DIR"
    values, problems = only_keys("quantize", overrides, _KEYS, usage)
    problems += choice_problems(values, _CHOICES)
    typed: dict[str, Any] = dict(values)
    for key, (kind, low) in {"samples": (int, 1), "max_drop": (float, 0)}.items():
        if key in values:
            try:
                typed[key] = kind(values[key])
            except ValueError:
                typed[key] = low - 1
            if not typed[key] >= low:
                problems.append(Problem(key, f"is {values[key]!r}: a number from {low} on"))
    raise_problems(problems)
    typed |= {"overwrite": values.get("overwrite") == "true"}
    return typed | ({"out": Path(values["out"])} if "out" in values else {})


def _table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return what changes, a line for each value."""
    lines = [f"{'':<16}{'before':>10}{'after':>10}"]
    words = {"megabytes": "size, MB", "ms_of_1": "1 sample, ms", "ms_of_32": "32 samples, ms"}
    for name, value in before.items():
        lines.append(f"{words.get(name, name):<16}{value:>10.4g}{after[name]:>10.4g}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
