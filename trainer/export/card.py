"""The model card beside an exported model: inputs and outputs, provenance, metrics, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.inference.run import Run

_CURVE = 20  # validations that are listed


def model_card(run: Run, facts: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    origin = facts["provenance"]
    return "\n".join(
        [
            *_description(run, facts, origin),
            "## Metrics of the run",
            "",
            *[f"- {name}: {value:.4f}" for name, value in _numbers(origin["results"])],
            "",
            *_quantization(facts),
            *_curve(run),
            *_verification(facts["verified"]),
            "## Limits",
            "",
            "- The metrics hold for data like the run's. Nothing was measured on any other data.",
            "- Fairness, calibration and robustness were not measured.",
            "",
            "## Configuration",
            "",
            "```yaml",
            origin["config"].rstrip("\n"),
            "```",
            "",
        ]
    )


def _description(run: Run, facts: Mapping[str, Any], origin: Mapping[str, Any]) -> list[str]:
    """Return what the model is, takes and returns, and where it comes from."""
    return [
        f"# {origin['name']}",
        "",
        f"Model: `{run.facts.model['_target_']}`, as `{facts['format']}`: {facts['file']}.",
        "",
        "## Input and output",
        "",
        f"- Input: {json.dumps(facts['input'])}",
        f"- Output: {facts['output']}",
        f"- Classes: {_listed(facts['classes'])}",
        "- Transforms that the caller applies before, in this order: "
        + (", ".join(f"`{n}`" for n in facts["transforms_of_the_caller"]) or "none"),
        "",
        "## Where it comes from",
        "",
        f"- Run `{origin['run']}`, checkpoint `{origin['checkpoint']}` (sha256 "
        f"`{origin['sha256']}`), step {origin['step']}",
        f"- Weights: {_weights(origin['average'])}",
        *[f"- Data: {line}" for line in _data(run, origin["data"])],
        f"- Versions: {', '.join(f'{k} {v}' for k, v in origin['versions'].items())}",
        "",
    ]


def _verification(verified: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Verified",
        "",
        f"- Against the model in PyTorch on samples: {verified['samples']}; largest difference "
        f"{verified['largest_difference']:.2g}",
    ]
    if (moved := verified.get("difference_of_preprocessing")) is not None:
        lines.append(f"- Preprocessing in the graph against that of training: {moved:.2g}")
    return [*lines, ""]


def _listed(classes: list[str] | None) -> str:
    return ", ".join(classes) if classes else "not named"


def _weights(average: str | None) -> str:
    return "of the checkpoint" if average is None else f"the average of `callbacks.{average}`"


def _data(run: Run, splits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each split that the run noted, or what its configuration names."""
    node = run.config.data.train or {}
    target = str(node.get("_target_", "not named"))
    if not splits:
        return [f"`{target}`"]
    return [
        f"{split['split']}: `{target}`, "
        + ", ".join(f"{key} {value}" for key, value in split.items() if key != "split")
        for split in splits
    ]


def _numbers(results: Mapping[str, float | None]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in results.items() if value is not None]


def _quantization(facts: Mapping[str, Any]) -> list[str]:
    """Return accuracy, size and speed before and after quantization; nothing without it."""
    told = facts.get("quantization")
    if not told:
        return []
    words = ", ".join(f"{key} {value}" for key, value in told.items())
    before, after = facts["before"], facts["after"]
    rows = [f"| {name} | {value:.4g} | {after[name]:.4g} |" for name, value in before.items()]
    head = ["| | in floats | quantized |", "|---|---|---|"]
    return ["## Quantization", "", f"Quantized: {words}.", "", *head, *rows, ""]


def _curve(run: Run) -> list[str]:
    """Return a table of the last validations."""
    logged = [line for line in run.metrics if any(key.startswith("val/") for key in line)]
    if not logged:
        return []
    names = sorted({key for line in logged for key in line if key.startswith("val/")})
    rows = [
        f"| {line['step']} | "
        + " | ".join(f"{line.get(n, float('nan')):.4f}" for n in names)
        + " |"
        for line in logged[-_CURVE:]
    ]
    head = ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return [*head, *rows, ""]
