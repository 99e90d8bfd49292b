"""Test an exported file with the metrics of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Config
from trainer.assembly.experiment import build_evaluator
from trainer.checkpoints.archive import digest
from trainer.errors import ModelError
from trainer.export.artefact import FACTS
from trainer.export.formats import FORMATS, Answer
from trainer.inference.run import open_split
from trainer.strategies.strategy import Strategy
from trainer.tasks.supervised import Supervised


def _one_hot(answer: Tensor, classes: int | None) -> Tensor:
    """Turn class numbers [n, H, W] into outputs [n, classes, H, W], which rank the classes."""
    return nn.functional.one_hot(answer, classes or -1).movedim(-1, 1).float()


# From the outputs of a file, and the number of classes, to those that a task expects of a model.
_OUTPUTS_OF: Mapping[str, Callable[[Any, int | None], Any]] = {
    "logits": lambda answer, _: answer,
    "classes": lambda answer, _: torch.log(answer),  # of probabilities: their softmax is the same
    "labels": lambda answer, _: torch.logit(answer),
    "values": lambda answer, _: answer,
    "mask": _one_hot,  # the loss of such outputs means nothing
}


class Answering(nn.Module):
    """A file as a module with the outputs (logits) that a task expects of a model."""

    def __init__(self, answer: Answer, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self._answer = (answer,)  # no submodule: a program has no evaluation mode to enter
        self._back = _OUTPUTS_OF[facts["output"]]
        self._classes = facts.get("num_classes")

    def forward(self, x: Tensor) -> Any:
        """Map a batch of inputs to outputs."""
        return self._back(self._answer[0](x), self._classes)


def evaluate_artefact(
    config: Config, path: Path, split: str | None = None, allow_code: bool = False
) -> tuple[str, dict[str, float]]:
    """Return the split and the metrics of an exported file, as `evaluate_run` does for a model.

    Raises ModelError for a file that was not exported by Regimen or cannot be loaded, and for one
    whose format runs code when it is read unless `allow_code`.
    """
    facts = _facts_of(path)
    form = FORMATS[facts["format"]]
    if form.runs_code and not allow_code:
        raise ModelError(
            f"artefact={path}: a file of format {facts['format']} runs code when it is loaded: "
            "set allow_code=true if you trust its author"
        )
    try:
        answering = Answering(form.load(path, facts), facts)
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"artefact={path} cannot be loaded: {reason}") from error
    return metrics_of(config, answering, facts, split)


def _facts_of(path: Path) -> dict[str, Any]:
    """Return the facts in `export.json` beside a file, whose digest must match."""
    beside = path.parent / FACTS
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise ModelError(f"artefact={path}: there is no {missing}; regimen export writes both")
    try:
        facts: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        file, form, output = facts["file"], facts["format"], facts["output"]
        expected = facts["sha256"]
        facts["transforms_of_the_caller"] = list(facts["transforms_of_the_caller"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{beside} is damaged, or of an older version: export again") from error
    if file != path.name or output not in _OUTPUTS_OF or form not in FORMATS:
        raise ModelError(
            f"artefact={path}: {beside} describes {file} as {form!r} with output {output!r}: only "
            f"logits, probabilities or masks of {', '.join(FORMATS)} can be evaluated"
        )
    if digest(path) != expected:
        raise ModelError(f"artefact={path} is not the file that {beside} describes: export again")
    return facts


def metrics_of(
    config: Config, answering: nn.Module, facts: Mapping[str, Any], split: str | None
) -> tuple[str, dict[str, float]]:
    """Return the split, and the metrics over it of a module that computes what a file does.

    It computes on the CPU in single precision. Of a file that answers with masks no loss is known.
    Raises ModelError for a transform that the run does not have.
    """
    steps, names = config.transforms.eval, facts["transforms_of_the_caller"]
    if unknown := [name for name in names if name not in steps]:
        raise ModelError(
            f"the file needs transforms.eval.{unknown[0]}, which the run does not have"
        )
    transforms = replace(config.transforms, eval={name: steps[name] for name in names})
    options: Any = {"precision": "fp32", "channels_last": False, "compile": False}
    config = replace(config, transforms=transforms, trainer=replace(config.trainer, **options))
    strategy = Strategy(torch.device("cpu"))
    split, loader, num_classes = open_split(config, strategy, split)
    trainer = build_evaluator(config, num_classes, strategy, answering)
    try:
        with torch.no_grad():
            metrics = trainer.evaluate(loader, split)
    finally:
        loader.close()
    if facts["output"] == "mask" and isinstance(trainer.task, Supervised):
        for name in trainer.task.losses.names:
            metrics.pop(f"{split}/{name}", None)
    return split, metrics
