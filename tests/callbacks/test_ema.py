import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from trainer import snapshot
from trainer.callback import Callback
from trainer.checkpoints.store import CheckpointStore


class History(Callback):
    """Remember the weights after every update, and those that a validation sees."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.weights.append(trainer.model[0].weight.detach().clone())

    def on_update_end(self, trainer: Any) -> None:
        self.weights.append(trainer.model[0].weight.detach().clone())


def averaged(trainer: Any) -> torch.Tensor:
    result: torch.Tensor = trainer.callbacks["ema"].state_dict()["model"]["0.weight"]
    return result


def test_is_the_average_written_out_by_hand(make_trainer: Any) -> None:
    history = History()
    trainer = make_trainer({"history": history, "ema": EMA(decay=0.8, warmup=False)})
    trainer.fit()
    expected = history.weights[0]
    for weight in history.weights[1:]:
        expected = 0.8 * expected + 0.2 * weight
    torch.testing.assert_close(averaged(trainer), expected, rtol=1e-14, atol=1e-14)


def test_warmup_and_update_every(make_trainer: Any) -> None:
    history = History()
    trainer = make_trainer({"history": history, "ema": EMA(decay=0.4, update_every=2)})
    trainer.fit()
    expected = history.weights[0]
    for step in (2, 4, 6, 8, 10):
        decay = min(0.4, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * history.weights[step]
    torch.testing.assert_close(averaged(trainer), expected, rtol=1e-14, atol=1e-14)


def test_a_skipped_update_does_not_count(make_trainer: Any) -> None:
    batches = [(torch.randn(6, 4).double(), torch.randn(6, 2).double()) for _ in range(5)]
    batches[2] = (batches[2][0] * float("nan"), batches[2][1])
    history = History()
    callbacks = {"history": history, "ema": EMA(decay=0.8, warmup=False)}
    trainer = make_trainer(callbacks, batches=batches, max_epochs=1, on_nonfinite="skip")
    trainer.fit()
    assert trainer.state.skipped_updates == 1
    expected = history.weights[0]
    for step in (1, 2, 4, 5):
        expected = 0.8 * expected + 0.2 * history.weights[step]
    torch.testing.assert_close(averaged(trainer), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("used", [True, False])
def test_which_weights_are_evaluated_is_explicit(make_trainer: Any, used: bool) -> None:
    ema = EMA(decay=0.9, warmup=False, use_for_evaluation=used)
    trainer = make_trainer({"ema": ema})
    trainer.fit()
    trained = copy.deepcopy(trainer.model.state_dict())
    evaluated = trainer.evaluate(trainer.val_loader, "val")
    assert all(torch.equal(v, trained[n]) for n, v in trainer.model.state_dict().items())
    state = ema.state_dict()["model"] if used else trained
    plain = make_trainer({})
    plain.model.load_state_dict(state)
    assert plain.evaluate(plain.val_loader, "val") == evaluated
    assert trainer.metrics["val/loss"] == evaluated["val/loss"]


def test_the_best_checkpoint_evaluates_to_what_training_said(
    make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer({"ema": EMA(0.9), "checkpoint": Checkpoint()}, tmp_path)
    trainer.fit()
    payload = CheckpointStore(tmp_path / "checkpoints").load(tmp_path / "checkpoints" / "last.pt")
    assert not torch.equal(payload["ema"]["model"]["0.weight"], payload["model"]["0.weight"])
    fresh = make_trainer({"ema": EMA(0.9)})  # as the evaluate command: nothing is fitted
    snapshot.load_weights(fresh, payload)
    assert fresh.evaluate(fresh.val_loader, "val")["val/loss"] == trainer.metrics["val/loss"]


def test_buffers_that_are_copied_are_the_models_between_two_averagings(make_trainer: Any) -> None:
    seen: list[torch.Tensor] = []

    class Looks(Callback):
        def on_validation_start(self, trainer: Any) -> None:
            with trainer.evaluation_weights():
                seen.append(trainer.model[1].running_mean.clone())

    ema = EMA(0.9, update_every=3, use_buffers=False)
    trainer = make_trainer({"looks": Looks(), "ema": ema}, max_epochs=1)
    trainer.fit()  # 5 updates: the last average is that of the third
    own = trainer.model.state_dict()
    assert torch.equal(seen[-1], own["1.running_mean"])
    saved = ema.state_dict()["model"]
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(saved[name], own[name])
    assert not torch.equal(saved["0.weight"], own["0.weight"])
