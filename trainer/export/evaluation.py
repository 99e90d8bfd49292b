"""Test an exported file with the metrics of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conf.schema import Config
from trainer.build.experiment import build_evaluator, build_split
from trainer.errors import ModelError
from trainer.export.loading import facts_of_artefact, load_artefact
from trainer.strategies.strategy import Strategy
from trainer.tasks.supervised import Supervised


def evaluate_artefact(
    config: Config, path: Path, split: str, allow_code: bool = False
) -> dict[str, float]:
    """Return the metrics of an exported file over `split`, as `evaluate_run` does for a model.

    Raises ModelError for a file that was not exported by Regimen or cannot be loaded.
    """
    facts = facts_of_artefact(path)
    answering = load_artefact(path, facts, allow_code)
    return metrics_of(config, answering, facts, split)


def metrics_of(
    config: Config, answering: nn.Module, facts: Mapping[str, Any], split: str
) -> dict[str, float]:
    """Return the metrics over `split` of a module that computes what a file with `facts` does.

    It computes on the CPU in single precision. Of a file that answers with masks no loss is known.
    Raises ModelError for a transform that the run does not have.
    """
    config = _for_files(config, facts["transforms_of_the_caller"])
    strategy = Strategy(torch.device("cpu"))
    loader, num_classes = build_split(config, strategy, split)
    trainer = build_evaluator(config, num_classes, strategy, answering)
    try:
        with torch.no_grad():
            metrics = trainer.evaluate(loader, split)
    finally:
        loader.close()
    if facts["output"] == "mask" and isinstance(trainer.task, Supervised):
        for name in trainer.task.losses.names:
            metrics.pop(f"{split}/{name}", None)
    return metrics


def _for_files(config: Config, names: Sequence[str]) -> Config:
    steps = config.transforms.eval
    if unknown := [name for name in names if name not in steps]:
        raise ModelError(
            f"the file needs transforms.eval.{unknown[0]}, which the run does not have"
        )
    transforms = replace(config.transforms, eval={name: steps[name] for name in names})
    options: Any = {"precision": "fp32", "channels_last": False, "compile": False}
    return replace(config, transforms=transforms, trainer=replace(config.trainer, **options))
