"""Where a model comes from, the card beside its file, and the lines of Python that run the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.export.formats import GRAPHS
from trainer.inference.run import Run, origin_of
from trainer.runs.status import MANIFEST, read_json

WEIGHTS = "safetensors"  # the format without a graph
_CURVE = 20  # validations that are listed
_FINE_TUNED = "models.pretrained.fine_tune"  # returns the network that it is given


def provenance(run: Run, checkpoint: str) -> dict[str, Any]:
    """Return the provenance of a model: run, checkpoint and its results, data, versions."""
    origin = origin_of(run.path, run.trainer(checkpoint), checkpoint)
    return {
        **origin,
        "name": run.config.name,
        "checkpoint": Path(origin["checkpoint"]).name,
        "results": {  # what was measured at its step is of this checkpoint
            key: value
            for line in run.metrics
            if line["step"] == origin["step"]
            for key, value in line.items()
            if key.startswith(("val/", "test/")) and value is not None
        },
        "data": read_json(run.path / MANIFEST).get("data") or [],
        "config": (run.path / "config.yaml").read_text(encoding="utf-8"),
    }


def model_card(run: Run, facts: Mapping[str, Any], folder: Path) -> str:
    """Return the card as Markdown; `folder` is where the file will be."""
    origin, verified = facts["provenance"], facts["verified"]
    average, target = origin["average"], (run.config.data.train or {}).get("_target_", "not named")
    by_caller = ", ".join(f"`{name}`" for name in facts["transforms_of_the_caller"])
    checked = [
        f"- Against the model in PyTorch on samples: {verified['samples']}; largest difference "
        f"{verified['largest_difference']:.2g}"
    ]
    if (moved := verified.get("difference_of_preprocessing")) is not None:
        checked.append(f"- Preprocessing in the graph against that of training: {moved:.2g}")
    sections = {
        "Input and output": [
            f"- Input: {json.dumps(facts['input'])}",
            f"- Output: {facts['output']}",
            f"- Classes: {', '.join(facts['classes'] or ()) or 'not named'}",
            f"- Transforms that the caller applies before, in this order: {by_caller or 'none'}",
        ],
        "To run it": ["```python", *how_to_load(facts, folder), "```"],
        "Where it comes from": [
            f"- Run `{origin['run']}`, checkpoint `{origin['checkpoint']}` (sha256 "
            f"`{origin['sha256']}`), step {origin['step']}",
            f"- Weights: {f'the average of `callbacks.{average}`' if average else 'as trained'}",
            *(f"- Data: `{target}`, {_listed(split)}" for split in origin["data"] or [{}]),
            f"- Versions: {_listed(origin['versions'])}",
        ],
        f"Metrics of the checkpoint (step {origin['step']})": [
            f"- {name}: {value:.4f}" for name, value in origin["results"].items()
        ],
        "Quantization": _quantization(facts),
        "Validations of the run": _curve(run),
        "Verified": checked,
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


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _quantization(facts: Mapping[str, Any]) -> list[str]:
    """Return accuracy, size and speed before and after quantization; nothing without it."""
    if "quantization" not in facts:
        return []
    after = facts["after"]
    rows = [f"| {name} | {v:.4g} | {after[name]:.4g} |" for name, v in facts["before"].items()]
    head = ["", "| | in floats | quantized |", "|---|---|---|"]
    return [f"Quantized: {_listed(facts['quantization'])}.", *head, *rows]


def _curve(run: Run) -> list[str]:
    """Return a table of the last validations."""
    logged = [line for line in run.metrics if any(key.startswith("val/") for key in line)]
    names = sorted({key for line in logged for key in line if key.startswith("val/")})
    rows = []
    for line in logged[-_CURVE:]:
        values = (f"{value:.4f}" if (value := line.get(n)) is not None else "" for n in names)
        rows.append(f"| {line['step']} | {' | '.join(values)} |")
    head = [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return [*head, *rows] if rows else []


def how_to_load(facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Return lines of Python that load a file without Regimen's trainer."""
    path = str(folder.absolute() / facts["file"])
    if facts["format"] != WEIGHTS:
        call = "network(x)" if facts["format"] != "onnx" else "network.run(None, {'input': x})"
        shape = f"  # x: {facts['input']['dtype']} {facts['input']['shape']}"
        return [GRAPHS[facts["format"]].line.format(path=path), f"answers = {call}{shape}"]
    return [
        "from hydra.utils import instantiate; from safetensors.torch import load_file",
        f"model = instantiate({_bare(facts['model'])}, _convert_='all')",
        f"model.load_state_dict(load_file({path!r}))",
    ]


def _bare(value: Any) -> Any:
    """Return a node without the weights that it began with: those of the file take their place."""
    if isinstance(value, list):
        return [_bare(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("_target_") == _FINE_TUNED:
        return _bare(value["model"])
    dropped = {"weights": None, "pretrained": False} if "_target_" in value else {}
    return {key: dropped.get(key, _bare(part)) for key, part in value.items()}
