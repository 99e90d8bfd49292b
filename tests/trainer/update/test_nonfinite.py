"""A non-finite update changes nothing: neither weights, buffers nor optimizer state."""

import copy

import pytest
import torch
from torch import Tensor, nn

from toys import batches, normed
from trainer.callback import Callback
from trainer.errors import DivergedError
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update import sums

BAD = 2  # the update whose batch holds a NaN, counted from 0


@pytest.fixture(params=["cpu", "as-on-a-gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether reading a number of the device is taken to cost a wait."""
    monkeypatch.setattr(sums, "waits_for", lambda device: request.param != "cpu")
    return str(request.param)


class Record(Callback):
    """Keep everything after each update."""

    def __init__(self) -> None:
        self.states: list[tuple[dict[str, Tensor], dict, float]] = []

    def on_update_end(self, trainer: Trainer) -> None:
        optimizer = next(iter(trainer.optimizers.optimizers.values()))
        lr = next(iter(trainer.learning_rates().values()))
        state = copy.deepcopy((trainer.model.state_dict(), optimizer.state_dict()["state"], lr))
        self.states.append(state)


def train(on_nonfinite: str, **options) -> tuple[Trainer, Record]:
    model, record = normed(), Record()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer(
        model,
        Classification(3),
        optimizer,
        batches(5, BAD),
        lr_scheduler=scheduler,
        callbacks={"record": record},
        options=TrainerOptions(**{"max_epochs": 1, "on_nonfinite": on_nonfinite, **options}),
    )
    trainer.fit()
    return trainer, record


def flat(state) -> list[Tensor]:
    weights, optimizer, lr = state
    slots = [v for s in optimizer.values() for v in s.values()]
    return [*weights.values(), *slots, torch.tensor(lr)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("steps", [1, 3])
def test_skipping_leaves_everything_as_it_was(steps: int) -> None:
    trainer, record = train("skip", gradient_accumulation_steps=steps)
    for before, after in zip(flat(record.states[BAD - 1]), flat(record.states[BAD]), strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(flat(record.states[BAD])[0], flat(record.states[BAD + 1])[0])
    state = trainer.state
    assert (state.global_step, state.updates, state.skipped_updates) == (4, 5, 1)
    assert trainer.metrics["train/loss"] == pytest.approx(trainer.metrics["train/loss"])
    assert trainer.metrics["train/skipped_updates"] == 1


@pytest.mark.usefixtures("device")
def test_stopping_names_the_sample_and_keeps_finite_weights() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, Classification(3), optimizer, batches(5, BAD))
    with pytest.raises(DivergedError, match=r"sample 3 holds NaN.*update 3") as error:
        trainer.fit()
    assert error.value.exit_code == 5
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert trainer.state.global_step == BAD


@pytest.mark.usefixtures("device")
def test_too_many_in_a_row_end_the_run() -> None:
    model = normed()
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
    options = TrainerOptions(max_epochs=9, on_nonfinite="skip", max_skipped_in_a_row=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, Classification(3), optimizer, batches(5), options=options)
    with pytest.raises(DivergedError, match="last 7 updates"):
        trainer.fit()


@pytest.mark.usefixtures("device")
def test_an_infinite_loss_with_a_finite_gradient_stops_the_run() -> None:
    model = normed()

    class Infinite(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output, target) + float("inf")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, Classification(3, Infinite()), optimizer, batches(5))
    with pytest.raises(DivergedError, match="the loss is not finite"):
        trainer.fit()
    assert trainer.state.global_step == 0
    for parameter, before in zip(model.parameters(), normed().parameters(), strict=True):
        assert torch.equal(parameter, before)
