"""The model card beside an exported model, and the lines of Python that run the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.export.formats import FORMATS, WEIGHTS
from trainer.inference.run import Run

_CURVE = 20  # validations that are listed
_FINE_TUNED = "models.pretrained.fine_tune"  # returns the network that it is given


def model_card(run: Run, facts: Mapping[str, Any], folder: Path) -> str:
    """Return the card as Markdown; `folder` is where the file will be."""
    origin = facts["provenance"]
    sections = {
        "Input and output": _inputs_and_outputs(facts),
        "To run it": ["```python", *how_to_load(facts, folder), "```"],
        "Where it comes from": _origin(run, origin),
        f"Metrics of the checkpoint (step {origin['step']})": [
            f"- {name}: {value:.4f}" for name, value in origin["results"].items()
        ],
        "Quantization": _quantization(facts),
        "Validations of the run": _curve(run),
        "Verified": _verification(facts["verified"]),
        "Limits": [
            "- The metrics hold for data like the run's. Nothing was measured on any other data.",
            "- Fairness, calibration and robustness were not measured.",
        ],
        "Configuration": ["```yaml", origin["config"].rstrip("\n"), "```"],
    }
    model = f"Model: `{run.facts.model['_target_']}`, as `{facts['format']}`: {facts['file']}."
    lines = [f"# {origin['name']}", "", model, ""]
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""] if content else []
    return "\n".join(lines)


def _inputs_and_outputs(facts: Mapping[str, Any]) -> list[str]:
    return [
        f"- Input: {json.dumps(facts['input'])}",
        f"- Output: {facts['output']}",
        f"- Classes: {', '.join(facts['classes'] or ()) or 'not named'}",
        "- Transforms that the caller applies before, in this order: "
        + (", ".join(f"`{n}`" for n in facts["transforms_of_the_caller"]) or "none"),
    ]


def _origin(run: Run, origin: Mapping[str, Any]) -> list[str]:
    average, target = origin["average"], (run.config.data.train or {}).get("_target_", "not named")
    weights = "of the checkpoint" if average is None else f"the average of `callbacks.{average}`"
    data = [
        f"- Data: {split['split']}: `{target}`, "
        + ", ".join(f"{key} {value}" for key, value in split.items() if key != "split")
        for split in origin["data"]
    ]
    return [
        f"- Run `{origin['run']}`, checkpoint `{origin['checkpoint']}` (sha256 "
        f"`{origin['sha256']}`), step {origin['step']}",
        f"- Weights: {weights}",
        *(data or [f"- Data: `{target}`"]),
        f"- Versions: {', '.join(f'{k} {v}' for k, v in origin['versions'].items())}",
    ]


def _verification(verified: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- Against the model in PyTorch on samples: {verified['samples']}; largest difference "
        f"{verified['largest_difference']:.2g}"
    ]
    if (moved := verified.get("difference_of_preprocessing")) is not None:
        lines.append(f"- Preprocessing in the graph against that of training: {moved:.2g}")
    return lines


def _quantization(facts: Mapping[str, Any]) -> list[str]:
    """Return accuracy, size and speed before and after quantization; nothing without it."""
    if not (told := facts.get("quantization")):
        return []
    words = ", ".join(f"{key} {value}" for key, value in told.items())
    after = facts["after"]
    rows = [f"| {name} | {v:.4g} | {after[name]:.4g} |" for name, v in facts["before"].items()]
    return [f"Quantized: {words}.", "", "| | in floats | quantized |", "|---|---|---|", *rows]


def _curve(run: Run) -> list[str]:
    """Return a table of the last validations."""
    logged = [line for line in run.metrics if any(key.startswith("val/") for key in line)]
    if not logged:
        return []
    names = sorted({key for line in logged for key in line if key.startswith("val/")})
    rows = []
    for line in logged[-_CURVE:]:
        values = (f"{value:.4f}" if (value := line.get(n)) is not None else "" for n in names)
        rows.append(f"| {line['step']} | {' | '.join(values)} |")
    return [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]


def how_to_load(facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Return lines of Python that load a file without Regimen's trainer."""
    path = str(folder.absolute() / facts["file"])
    if facts["format"] != WEIGHTS:
        call = "network(x)" if facts["format"] != "onnx" else "network.run(None, {'input': x})"
        shape = f"  # x: {facts['input']['dtype']} {facts['input']['shape']}"
        return [FORMATS[facts["format"]].line.format(path=path), f"answers = {call}{shape}"]
    imports: dict[str, None] = {"from safetensors.torch import load_file": None}
    model = _spelled(facts["model"], imports)
    loaded = f"model.load_state_dict(load_file({path!r}))"
    return ["; ".join(imports), f"model = {model}", loaded]


def _spelled(value: Any, imports: dict[str, None]) -> str:
    """Return the Python that makes a node's object; `imports` grows by what it needs."""
    if isinstance(value, list):
        return f"[{', '.join(_spelled(part, imports) for part in value)}]"
    if not isinstance(value, Mapping):
        return repr(value)
    if "_target_" not in value:
        parts = (f"{key!r}: {_spelled(part, imports)}" for key, part in value.items())
        return "{" + ", ".join(parts) + "}"
    if value["_target_"] == _FINE_TUNED:
        return _spelled(value["model"], imports)
    # The module of a target is imported since the model was built.
    path = str(value["_target_"]).split(".")
    end = next((e for e in range(len(path) - 1, 0, -1) if ".".join(path[:e]) in sys.modules), -1)
    name = ".".join(path[end:])
    imports[f"from {'.'.join(path[:end])} import {path[end]}"] = None
    # The weights of the file take the place of those that it began with.
    dropped = {"weights": None, "pretrained": False}
    words = [_spelled(part, imports) for part in value.get("_args_", ())]
    words += [
        f"{key}={_spelled(dropped.get(key, part), imports)}"
        for key, part in value.items()
        if not key.startswith("_")
    ]
    return f"{name}({', '.join(words)})"
