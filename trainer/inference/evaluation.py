"""Test a checkpoint of a run again."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from conf.errors import ConfigError, Problem
from conf.schema import Config
from trainer.build.experiment import build_split
from trainer.build.strategy import build_strategy
from trainer.inference.checkpoint import as_trained, find_checkpoint, load_trainer

logger = logging.getLogger("regimen")


def evaluate_run(config: Config, run_dir: Path, checkpoint: str, split: str) -> dict[str, float]:
    """Return the metrics of `checkpoint` (best, last or a path) over `split`, val or test.

    Raises CheckpointError, and ConfigError for a split that the configuration does not have.
    """
    path = find_checkpoint(run_dir, checkpoint)
    if getattr(config.data, split) is None:
        others = [s for s in ("test", "val") if getattr(config.data, s) is not None]
        hint = f"choose split={others[0]}" if others else None
        raise ConfigError(Problem(f"data.{split}", "is null: there is nothing to test", hint))
    strategy = build_strategy(config)
    strategy.setup()
    config = as_trained(config, path)
    loader, num_classes = build_split(config, strategy, split)
    trainer = load_trainer(run_dir, config, num_classes, strategy, str(path))
    if trainer.average is not None:
        logger.info("evaluating the average of callbacks.%s", trainer.average.name)
    with torch.no_grad():
        metrics = trainer.evaluate(loader, split, step=trainer.state.global_step)
    loader.close()
    return metrics
