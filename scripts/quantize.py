"""`regimen quantize run=RUN_DIR`: a trained model with 8-bit integers, as ONNX."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.errors import raise_problems
from scripts.cli.arguments import parse_or_help
from scripts.cli.console import importing, log_to_stderr
from scripts.cli.keys import Take, one_of, only_keys, true_or_false, whole
from scripts.cli.output import greet

_HELP = """\
Write a trained model with 8-bit integers as ONNX: smaller, and faster on a CPU. It is compared with
the model before it has its name; what it gains and loses is printed.

  regimen quantize run=RUN_DIR [method=auto|static|dynamic] [key=value ...]

  method         static: weights and activations, for convolutions. dynamic: weights of matrix
                 products, for transformers. auto (default): static where most weights are of
                 convolutions
  samples        512; training samples that the ranges of static are taken from. A run that was
                 trained with callbacks=[default,qat] has its own
  max_drop       0.01; more accuracy lost is an error, and nothing is written
  split          where it is measured: test (default), or val where the data have no test split
  out            a folder; default: RUN_DIR/exports/quantized. It holds the model, export.json and
                 card.md
  preprocessing  outside (default): floats in, logits out. inside: bytes in, probabilities out
  checkpoint     best (default), last, or a path
  overwrite      true replaces a folder that exists
"""


def quantize(argv: Sequence[str]) -> int:
    """Do what a command line asks for."""
    if (arguments := parse_or_help(argv, _HELP)) is None:
        return 0
    greet("cpu")
    log_to_stderr(verbose=True)
    keys: dict[str, Take] = {
        "run": str,
        "method": one_of("auto", "static", "dynamic"),
        "samples": whole(),
        "max_drop": _drop,
        "split": one_of("test", "val"),
        "out": Path,
        "preprocessing": one_of("outside", "inside"),
        "checkpoint": str,
        "overwrite": true_or_false,
    }
    required = {"run": "regimen quantize run=RUN_DIR"}
    values, problems = only_keys("quantize", arguments.overrides, keys, required)
    raise_problems(problems)
    with importing():
        from trainer.export.quantization import quantize_run
        from trainer.inference.run import load_run

    run = load_run(values.pop("run"), "cpu", arguments.allow_targets)
    made = quantize_run(run, **values)
    print(_table(made.before, made.after))
    ranges = ", ranges learnt in training" if made.learnt else ""
    print(f"written to {made.file} ({made.method}{ranges})")
    return 0


def _drop(text: str) -> float:
    try:
        drop = float(text)
    except ValueError:
        drop = -1.0
    if not drop >= 0:  # NaN is not either
        raise ValueError("a number from 0 on")
    return drop


def _table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return what changes, a line for each value."""
    lines = [f"{'':<16}{'before':>10}{'after':>10}"]
    words = {"megabytes": "size, MB", "ms_of_1": "1 sample, ms", "ms_of_32": "32 samples, ms"}
    for name, value in before.items():
        lines.append(f"{words.get(name, name):<16}{value:>10.4g}{after[name]:>10.4g}")
    return "\n".join(lines)
