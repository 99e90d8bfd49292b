"""Test a checkpoint on one split of its run's data."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from conf.check import parse
from conf.errors import ConfigError, Problem
from models.weights import no_initial_weights
from scripts.runs.run import best_or_last
from trainer import snapshot
from trainer.build.check import check_targets
from trainer.build.experiment import build_evaluation
from trainer.build.strategy import build_strategy
from trainer.checkpoints.schema import check_payload
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError
from trainer.targets.allow_list import allow

logger = logging.getLogger("regimen")


def test_again(
    raw: dict[str, Any], run_dir: Path, checkpoint: str, split: str, allowed: Iterable[str]
) -> dict[str, float]:
    """Return the metrics of `checkpoint` (best, last or a path) over `split`."""
    allow(allowed)
    config = parse(raw)
    check_targets(config)
    path = _checkpoint(run_dir, checkpoint)
    payload = CheckpointStore(path.parent).load(path)
    check_payload(payload, path)
    if getattr(config.data, split) is None:
        others = [s for s in ("test", "val") if getattr(config.data, s) is not None]
        hint = f"choose split={others[0]}" if others else None
        raise ConfigError(Problem(f"data.{split}", "is null: there is nothing to test", hint))
    strategy = build_strategy(config)
    strategy.setup()
    with no_initial_weights():  # the checkpoint brings its own
        trainer, loader = build_evaluation(config, strategy, split)
    snapshot.load_weights(trainer, payload)
    if trainer.average is not None:
        logger.info("evaluating the average of callbacks.%s", trainer.average.name)
    with torch.no_grad():
        metrics = trainer.evaluate(loader, split, step=snapshot.step_of(payload))
    loader.close()
    return metrics


def _checkpoint(run_dir: Path, name: str) -> Path:
    folder = run_dir / "checkpoints"
    path = best_or_last(folder) if name == "best" else folder / f"{name}.pt"
    if path is None or not path.exists():
        path = Path(name)
    if not path.is_file():
        raise CheckpointError(f"checkpoint={name}: {folder} holds no such checkpoint")
    return path
