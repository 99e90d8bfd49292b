"""Tests that need a GPU: what is decided on the device, and that no callback waits for it."""

from typing import Any

import pytest
import torch

from callbacks.ema import EMA
from callbacks.memory import Memory
from trainer.callback import Callback
from trainer.strategies.strategy import Strategy
from trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Watched(EMA):
    """An EMA whose updates fail if they wait for the device."""

    def on_update_end(self, trainer: Trainer) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            super().on_update_end(trainer)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class History(Callback):
    """Remember the weights after every update."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.weights.append(trainer.model[0].weight.detach().clone())  # type: ignore[index]

    on_update_end = on_fit_start


def test_a_skipped_update_does_not_move_the_average(make_trainer: Any) -> None:
    history, ema = History(), Watched(decay=0.8, warmup=False)
    callbacks = {"history": history, "ema": ema}
    on_gpu = {"strategy": Strategy("cuda"), "on_nonfinite": "skip"}
    trainer = make_trainer(callbacks, spoilt=2, **on_gpu)
    trainer.fit()
    assert trainer.state.skipped_updates == 2
    expected = history.weights[0]
    for update in range(1, 11):
        if update not in (3, 8):
            expected = 0.8 * expected + 0.2 * history.weights[update]
    found = ema.state_dict()["model"]["0.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_peak_memory(make_trainer: Any) -> None:
    trainer = make_trainer({"memory": Memory()}, strategy=Strategy("cuda"))
    trainer.fit()
    allocated = trainer.metrics["memory/peak_allocated_mib"]
    assert 0 < allocated <= trainer.metrics["memory/peak_reserved_mib"]
