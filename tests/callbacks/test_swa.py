from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from callbacks.support import CallbackError
from callbacks.swa import SWA
from trainer.callback import Callback


class Torchs(Callback):
    """torch's own AveragedModel, fed at the ends of epochs."""

    def __init__(self, start_epoch: int) -> None:
        self._start_epoch = start_epoch

    def on_fit_start(self, trainer: Any) -> None:
        self.model = AveragedModel(trainer.model)

    def on_epoch_end(self, trainer: Any) -> None:
        if trainer.state.epoch > self._start_epoch:
            self.model.update_parameters(trainer.model)


@pytest.mark.parametrize(
    ("start_epoch", "first", "count"),
    [
        pytest.param(1, 1, 3, id="number"),
        pytest.param(0.5, 2, 2, id="share"),
        pytest.param(0, 0, 4, id="from the start"),
    ],
)
def test_equals_torchs_own(make_trainer: Any, start_epoch: float, first: int, count: int) -> None:
    swa, theirs = SWA(start_epoch), Torchs(first)
    trainer = make_trainer({"swa": swa, "theirs": theirs}, max_epochs=4)
    trainer.fit()
    assert swa.averaged == count
    # torch's pass over the training data, by which it, too, measures the average's statistics.
    update_bn(list(trainer.train_loader._loader), theirs.model)
    ours = swa.state_dict()["model"]
    for name, value in theirs.model.module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


def test_training_does_not_depend_on_it(make_trainer: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
        return nn.Sequential(*layers).double()

    states = []
    for callbacks in ({"swa": SWA(1)}, {}):
        trainer = make_trainer(callbacks, model=make(), max_epochs=4)
        torch.manual_seed(1)
        trainer.fit()
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_before_it_begins_the_model_itself_is_evaluated(make_trainer: Any) -> None:
    seen: list[dict[str, float]] = []

    class Compare(Callback):
        def on_validation_end(self, trainer: Any, metrics: Any) -> None:
            with_swap = trainer.evaluate(trainer.val_loader, "val")
            average, trainer.average = trainer.average, None
            seen.append({"swa": with_swap["val/loss"]})
            seen[-1]["own"] = trainer.evaluate(trainer.val_loader, "val")["val/loss"]
            trainer.average = average

    make_trainer({"swa": SWA(1), "compare": Compare()}, max_epochs=3).fit()
    assert [entry["swa"] == entry["own"] for entry in seen] == [True, False, False]


def test_a_share_needs_a_number_of_epochs(make_trainer: Any) -> None:
    trainer = make_trainer({"swa": SWA(0.75)}, max_epochs=None, max_steps=4)
    with pytest.raises(CallbackError, match=r"callbacks\.swa\.start_epoch=0\.75 is a fraction"):
        trainer.fit()


def test_a_run_too_short_says_so(make_trainer: Any, caplog: Any) -> None:
    make_trainer({"swa": SWA(5)}).fit()
    assert "callbacks.swa: the run ended before its start_epoch" in caplog.text
