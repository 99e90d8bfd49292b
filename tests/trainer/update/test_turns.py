"""Optimizers that take turns, or search: an update is applied as a whole or not at all (I10)."""

import copy
import itertools
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
        self._turn, self._bad, self._calls = turn, bad, 0

    def turn_step(self, model: nn.Module, batch: Any, turn: str) -> StepOutput:
        output = super().turn_step(model, batch, turn)
        self._calls += turn == self._turn
        lost = turn == self._turn and self._calls - 1 in self._bad
        assert isinstance(output.loss, Tensor)
        return StepOutput(output.loss * (float("nan") if lost else 1.0), sums=output.sums)


class History(Callback):
    """Keep all that updates change, before the first and after each."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.states.append(copy.deepcopy(state_of(trainer)))

    on_update_end = on_fit_start


def state_of(trainer: Trainer) -> list[Any]:
    optimizer = trainer.optimizers.state_dict()["optimizers"]
    return [trainer.model.state_dict(), {n: o["state"] for n, o in optimizer.items()}]


def trainer_of(task: GAN, device: torch.device = DEVICE, **options: Any) -> Trainer:
    torch.manual_seed(0)
    strategy = Strategy(device)
    model = strategy.prepare(Networks(in_channels=1, image_size=8, latent_dim=5, width=4))
    batches = [
        (torch.rand(4, 1, 8, 8, generator=g) * 2 - 1, torch.randn(4, 5, generator=g))
        for g in (torch.Generator().manual_seed(i) for i in range(UPDATES))
    ]
    return Trainer(
        model,
        task,
        build_optimizers(model, copy.deepcopy(NODE), prefer_fused=True),
        batches,
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

    with pytest.raises(UserCodeError, match=f"train/grad_norm_{GENERATOR}.*grad_norm_{GENERATOR}"):
        trainer_of(Named()).fit()


TURNS = pytest.mark.parametrize("turn", [DISCRIMINATOR, GENERATOR])


@TURNS
def test_a_non_finite_turn_undoes_those_before_it(turn: str) -> None:
    trainer = trainer_of(Failing(turn, (0, 2)), on_nonfinite="skip")
    trainer.fit()
    states = trainer.callbacks["history"].states  # type: ignore[attr-defined]
    moved = [bool(differences(a, b)) for a, b in itertools.pairwise(states)]
    assert moved == [False, True, False, True, True]
    counters = trainer.state
    assert (counters.global_step, counters.updates, counters.skipped_updates) == (3, 5, 2)
    assert not trainer.updater.guard.is_deferred


@TURNS
def test_skipped_updates_are_not_in_the_means(turn: str) -> None:
    bad = trainer_of(Failing(turn, (UPDATES - 1,)), on_nonfinite="skip")
    bad.fit()
    short = trainer_of(Failing(turn, ()), on_nonfinite="skip", limit_train_batches=UPDATES - 1)
    short.fit()
    names = {n for n in short.metrics if n.startswith("train/")}
    assert {n: bad.metrics[n] for n in names} == {n: short.metrics[n] for n in names}


@TURNS
@pytest.mark.parametrize("bad", [0, 2])
def test_a_run_that_a_turn_ends_is_as_before_the_update(turn: str, bad: int) -> None:
    trainer = trainer_of(Failing(turn, (bad,)))
    with pytest.raises(DivergedError, match=f"update {bad + 1}"):
        trainer.fit()
    before = trainer.callbacks["history"].states[bad]  # type: ignore[attr-defined]
    weights, optimizers = state_of(trainer)
    assert not differences(before[0], weights)
    # A kernel that leaves the very first step out has begun its state, with zeros.
    assert bad == 0 or not differences(before[1], optimizers)
    assert (
        all(not v.any() for o in optimizers.values() for s in o.values() for v in s.values()) or bad
    )
    assert trainer.state.global_step == bad
    assert trainer.updater.guard.is_deferred == (DEVICE != CPU)


@needs_simulation
def test_the_device_decides_alike() -> None:
    ends = []
    for device in (CPU, DEVICE):
        trainer = trainer_of(GAN(), device, max_epochs=2)
        trainer.fit()
        assert trainer.updater.guard.is_deferred == (device != CPU)
        ends.append([*state_of(trainer), trainer.metrics])
    assert differences(ends[0], ends[1]) == []


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1.0},
        {"clip_grad_value": 1.0},
        {"gradient_noise": GradientNoise(eta=0.1, gamma=0.5)},
        {"precision": "fp16"},
    ],
)
def test_options_that_lbfgs_would_ignore_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"LBFGS.*trainer.{next(iter(options))}"):
        searching(nn.Linear(4, 3), **options)


def searching(model: nn.Module, **options: Any) -> Trainer:
    make = partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
    options = {"precision": "fp32", "max_epochs": 1, "make": make, **options}
    return toys.trainer_of(Classification(3), batches(6), model=model, **options)


class Counting(nn.Module):
    """Count forward passes; from the one called `bad` on, answer NaN."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls, self._bad = 0, bad

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        lost = self._bad is not None and self.calls >= self._bad
        return torch.as_tensor(self.layer(x)) * (float("nan") if lost else 1.0)


def test_a_search_takes_what_was_computed_as_its_first_evaluation() -> None:
    torch.manual_seed(0)
    model = Counting()
    by_hand = copy.deepcopy(model.layer).to(DEVICE)
    searching(model).fit()
    other, calls = torch.optim.LBFGS(by_hand.parameters(), lr=0.1, max_iter=4), 0

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
