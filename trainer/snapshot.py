"""A run between two updates, as one dict: what a checkpoint holds (I5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer import rng
from trainer.checkpoint import FORMAT_VERSION
from trainer.trainer import Trainer


def take(trainer: Trainer, config: str = "") -> dict[str, Any]:
    """Return everything that the rest of the run depends on; a collective of all processes."""
    strategy = trainer.strategy
    callbacks = {name: callback.state_dict() for name, callback in trainer.callbacks.items()}
    return {
        "model": strategy.model_state(trainer.model),
        "optimizer": trainer.optimizers.state_dict(),
        "lr_scheduler": trainer.lr_schedule.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "ema": callbacks.pop("ema", {}),
        "callbacks": callbacks,
        "state": {
            "counters": trainer.state.state_dict(),
            "sums": strategy.gather(trainer.updater.sums.state_dict()),
            "metrics": dict(trainer.metrics),
            "world_size": strategy.world_size,
            "torch": str(torch.__version__),
        },
        "rng": strategy.gather(rng.capture()),
        "config": config,
        "format_version": FORMAT_VERSION,
    }


def restore(trainer: Trainer, payload: Mapping[str, Any]) -> list[str]:
    """Make `trainer` go on where `payload` was taken; return what cannot be exact, in words."""
    trainer.setup()
    notes = []
    state, rank = payload["state"], trainer.strategy.rank
    trainer.strategy.load_model_state(trainer.model, payload["model"])
    trainer.optimizers.load_state_dict(payload["optimizer"])
    trainer.lr_schedule.load_state_dict(payload["lr_scheduler"])
    trainer.precision.load_state_dict(payload["scaler"])
    saved = {**payload["callbacks"], "ema": payload["ema"]}
    for name, callback in trainer.callbacks.items():
        if saved.get(name):
            callback.load_state_dict(saved[name])
    trainer.state.load_state_dict(state["counters"])
    trainer.metrics.update(state["metrics"])
    trainer.resumed = True
    if state["world_size"] == trainer.strategy.world_size:
        trainer.updater.sums.load_state_dict(state["sums"][rank])
        notes += rng.restore(payload["rng"][rank])
    else:
        notes.append(
            f"saved by {state['world_size']} processes, resumed by {trainer.strategy.world_size}: "
            "the samples of every update stay the same; dropout masks and the last digits do not"
        )
        _merge_sums(trainer, state["sums"])
    return notes


def _merge_sums(trainer: Trainer, states: list[Mapping[str, Any]]) -> None:
    # One process takes over what all had summed since the last log; the others begin at zero.
    for state in states:
        for name, total in state["sums"].items():
            real = int(trainer.is_main)
            count = state["counts"][name]
            trainer.updater.sums.add(name, total.to(trainer.strategy.device), count * real, real)
