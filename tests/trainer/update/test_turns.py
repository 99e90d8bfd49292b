"""Optimizers that take turns, or search: an update is applied as a whole or not at all (I10)."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from accelerator import CPU, DEVICE, needs_simulation
from regimen.callbacks.ema import EMA
from regimen.models.gan import GAN as Networks  # noqa: N811
from regimen.scripts.composition.compose import compose
from regimen.trainer.callback import Callback
from regimen.trainer.errors import DivergedError, ModelError, UserCodeError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import GradientNoise, TrainerOptions
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import StepOutput
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.gan import DISCRIMINATOR, GAN, GENERATOR
from regimen.trainer.trainer import Trainer
from toys import batches, differences

NODE = compose(["experiment=gan", "optimizer=gan"]).config["optimizer"]


UPDATES = 5


class Failing(GAN):
    """Lose one of the turns of the updates `bad`, counted from 0."""

    def __init__(self, turn: str, bad: tuple[int, ...]) -> None:
        super().__init__()
        self._turn = turn
        self._bad = bad
        self._calls = 0

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput:
        output = super().turn_step(model, batch, turn)
        if turn != self._turn:
            return output
        number = self._calls
        self._calls += 1
        if number not in self._bad:
            return output
        assert isinstance(output.loss, Tensor)
        return StepOutput(output.loss * math.nan, sums=output.sums)


class History(Callback):
    """Keep all that updates change, before the first and after each."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.states.append(copy.deepcopy(state_of(trainer)))

    on_update_end = on_fit_start


def state_of(trainer: Trainer) -> list[Any]:
    """Return the weights, and the state of each optimizer."""
    saved = trainer.optimizers.state_dict()["optimizers"]
    states = {name: optimizer["state"] for name, optimizer in saved.items()}
    return [trainer.model.state_dict(), states]


def history_of(trainer: Trainer) -> list[Any]:
    history = trainer.callbacks["history"]
    assert isinstance(history, History)
    return history.states


def pictures_and_noise(seed: int) -> tuple[Tensor, Tensor]:
    """Return a batch of 4 pictures in [-1, 1], and of noise."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(4, 1, 8, 8, generator=generator)
    return shares * 2 - 1, torch.randn(4, 5, generator=generator)


def trainer_of(task: GAN, device: torch.device = DEVICE, **options: Any) -> Trainer:
    torch.manual_seed(0)
    strategy = Strategy(device)
    model = strategy.prepare(Networks(in_channels=1, image_size=8, latent_dim=5, width=4))
    return Trainer(
        model,
        task,
        build_optimizers(model, copy.deepcopy(NODE), prefer_fused=True),
        [pictures_and_noise(seed) for seed in range(UPDATES)],
        strategy=strategy,
        callbacks={"history": History(), "ema": EMA(0.9)},
        options=TrainerOptions(**{"max_epochs": 1, "log_every_n_steps": 99, **options}),
    )


def test_a_metric_may_not_have_the_name_of_another_turns_norm() -> None:
    class Named(GAN):
        def turn_step(self, model: Any, batch: Any, turn: str) -> StepOutput:
            output = super().turn_step(model, batch, turn)
            other = GENERATOR if turn == DISCRIMINATOR else DISCRIMINATOR
            return replace(output, sums={f"grad_norm_{other}": (torch.tensor(1.0), 1)})

    trainer = trainer_of(Named())
    with pytest.raises(UserCodeError, match=f"train/grad_norm_{GENERATOR}.*grad_norm_{GENERATOR}"):
        trainer.fit()


TURNS = pytest.mark.parametrize("turn", [DISCRIMINATOR, GENERATOR])


@TURNS
def test_a_non_finite_turn_undoes_those_before_it(turn: str) -> None:
    trainer = trainer_of(Failing(turn, (0, 2)), on_nonfinite="skip")
    trainer.fit()

    moved = []
    for before, after in itertools.pairwise(history_of(trainer)):
        moved.append(differences(before, after) != [])

    assert moved == [False, True, False, True, True]

    counters = trainer.state
    assert counters.global_step == 3
    assert counters.updates == 5
    assert counters.skipped_updates == 2
    assert not trainer.updater.guard.is_deferred


@TURNS
def test_skipped_updates_are_not_in_the_means(turn: str) -> None:
    bad = trainer_of(Failing(turn, (UPDATES - 1,)), on_nonfinite="skip")
    bad.fit()
    short = trainer_of(Failing(turn, ()), on_nonfinite="skip", limit_train_batches=UPDATES - 1)
    short.fit()

    expected = {name: value for name, value in short.metrics.items() if name.startswith("train/")}

    assert expected
    assert {name: bad.metrics[name] for name in expected} == expected


@TURNS
@pytest.mark.parametrize("bad", [0, 2])
def test_a_run_that_a_turn_ends_is_as_before_the_update(turn: str, bad: int) -> None:
    trainer = trainer_of(Failing(turn, (bad,)))
    with pytest.raises(DivergedError, match=f"update {bad + 1}"):
        trainer.fit()

    weights_before, optimizers_before = history_of(trainer)[bad]
    weights, optimizers = state_of(trainer)
    assert differences(weights_before, weights) == []

    if bad:
        assert differences(optimizers_before, optimizers) == []
    else:
        # A kernel that leaves the very first step out has begun its state, with zeros.
        for states in optimizers.values():
            for state in states.values():
                for value in state.values():
                    assert not value.any()
    assert trainer.state.global_step == bad
    assert trainer.updater.guard.is_deferred == (DEVICE != CPU)


@needs_simulation
def test_the_device_decides_alike() -> None:
    def end(device: torch.device) -> list[Any]:
        trainer = trainer_of(GAN(), device, max_epochs=2)
        trainer.fit()
        assert trainer.updater.guard.is_deferred == (device != CPU)
        return [*state_of(trainer), trainer.metrics]

    assert differences(end(CPU), end(DEVICE)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_grad_norm", 1.0),
        ("clip_grad_value", 1.0),
        ("gradient_noise", GradientNoise(eta=0.1, gamma=0.5)),
        ("precision", "fp16"),
    ],
)
def test_options_that_lbfgs_would_ignore_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"LBFGS.*trainer.{name}"):
        searching(nn.Linear(4, 3), **{name: value})


def searching(model: nn.Module, **options: Any) -> Trainer:
    make = partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
    options = {
        "precision": "fp32",
        "max_epochs": 1,
        "make": make,
        **options,
    }
    return toys.trainer_of(Classification(3), batches(6), model=model, **options)


class Counting(nn.Module):
    """Count forward passes; from the one called `bad` on, answer NaN."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0
        self._bad = bad

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x)
        if self._bad is not None and self.calls >= self._bad:
            return output * math.nan
        return output


def test_a_search_takes_what_was_computed_as_its_first_evaluation() -> None:
    torch.manual_seed(0)
    model = Counting()
    by_hand = copy.deepcopy(model.layer).to(DEVICE)
    searching(model).fit()
    other = torch.optim.LBFGS(by_hand.parameters(), lr=0.1, max_iter=4)
    calls = 0

    for x, y in batches(6):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal calls
            calls += 1
            other.zero_grad()
            loss = nn.functional.cross_entropy(by_hand(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            return loss

        other.step(closure)  # type: ignore[arg-type]

    assert model.calls == calls
    for ours, theirs in zip(model.layer.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, check_device=False)


def test_a_search_that_ends_in_nan_is_undone() -> None:
    torch.manual_seed(0)
    model = Counting(bad=2)  # the first evaluation is finite, the search meets NaN
    before = copy.deepcopy(model.state_dict())
    trainer = searching(model, on_nonfinite="skip", max_skipped_in_a_row=99)
    trainer.fit()

    assert trainer.state.skipped_updates == 6
    assert differences(before, model.state_dict()) == []
    assert not trainer.optimizers.optimizers["optimizer"].state
