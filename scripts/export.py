"""`regimen export` and `regimen quantize`: a trained model as a file for other programs."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.errors import raise_problems
from scripts.cli.arguments import Take, one_of, parse_or_help, take_keys, true_or_false, whole
from scripts.cli.console import greet, importing, log_to_stderr

_BOTH = """\
  preprocessing  outside (default): floats in, logits out. inside: bytes in, probabilities out
  checkpoint     best (default), last, or a path
  overwrite      true replaces a folder that exists
"""
_EXPORT = """\
Write a trained model as a file that other programs load; it is verified before it has its name.

  regimen export run=RUN_DIR format=onnx|torch_export|torchscript|aoti|safetensors [key=value ...]

  out            a folder; default: RUN_DIR/exports/FORMAT. It holds the model, export.json
                 (classes, transforms, provenance, what was verified) and card.md
"""
_QUANTIZE = """\
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
"""
FORMATS = ("onnx", "torch_export", "torchscript", "aoti", "safetensors")
_KEYS: Mapping[str, Take] = {
    "run": str,
    "out": Path,
    "preprocessing": one_of("outside", "inside"),
    "checkpoint": str,
    "overwrite": true_or_false,
}


def export(argv: Sequence[str]) -> int:
    """Write a model in another format, as a command line asks for it."""
    wanted = {"format": f"one of {', '.join(FORMATS)}"}
    if (taken := _open("export", argv, _EXPORT, {"format": one_of(*FORMATS)}, wanted)) is None:
        return 0
    run, values = taken
    with importing():
        from trainer.export.artefact import export_run
        from trainer.export.card import how_to_load

    path, facts = export_run(run, values.pop("format"), **values)
    for note in facts.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    print(*how_to_load(facts, path.parent), sep="\n")
    difference = facts["verified"]["largest_difference"]
    print(f"written to {path} (largest difference to the model: {difference:.2g})")
    return 0


def quantize(argv: Sequence[str]) -> int:
    """Write a model with 8-bit integers, as a command line asks for it."""
    own: dict[str, Take] = {
        "method": one_of("auto", "static", "dynamic"),
        "samples": whole(),
        "max_drop": _drop,
        "split": one_of("test", "val"),
    }
    if (taken := _open("quantize", argv, _QUANTIZE, own, {})) is None:
        return 0
    run, values = taken
    with importing():
        from trainer.export.quantization import quantize_run

    path, facts = quantize_run(run, **values)
    words = {"megabytes": "size, MB", "ms_of_1": "1 sample, ms", "ms_of_32": "32 samples, ms"}
    print(f"{'':<16}{'before':>10}{'after':>10}")
    for name, value in facts["before"].items():
        print(f"{words.get(name, name):<16}{value:>10.4g}{facts['after'][name]:>10.4g}")
    how = facts["quantization"]
    print(f"written to {path} ({how['method']}, ranges {how['ranges']})")
    return 0


def _open(
    command: str,
    argv: Sequence[str],
    text: str,
    own: Mapping[str, Take],
    required: Mapping[str, str],
) -> tuple[Any, dict[str, Any]] | None:
    """Return the run that a command line names, and its other keys; None where it asks for help."""
    if (arguments := parse_or_help(argv, text + _BOTH)) is None:
        return None
    greet("cpu")
    log_to_stderr(verbose=True)
    required = {"run": f"regimen {command} run=RUN_DIR", **required}
    keys = {**_KEYS, **own}
    values, _, problems = take_keys(arguments.overrides, keys, required, command)
    raise_problems(problems)
    with importing():
        from trainer.inference.run import load_run

    return load_run(values.pop("run"), "cpu", arguments.allow_targets), values


def _drop(text: str) -> float:
    try:
        drop = float(text)
    except ValueError:
        drop = -1.0
    if not drop >= 0:  # NaN is not either
        raise ValueError("a number from 0 on")
    return drop
