"""Evaluation draws from generators of its own: training goes on as if there had been none (E3)."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.loading.loader import Loader
from data.orders import Sequential, Shuffled
from data.updates import UpdateSampler
from trainer import rng
from trainer.evaluation import EvaluationAbandoned
from trainer.options import TrainerOptions
from trainer.tasks.regression import Regression
from trainer.trainer import Trainer


class Points:
    def __init__(self) -> None:
        self.x = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum()


class Restless(nn.Module):
    """Draws from all generators in every pass, and tells what it drew in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.drawn: list[float] = []
        self.before_evaluation = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.before_evaluation()
        noise = torch.rand(()).item() + random.random() + float(np.random.random())
        if not self.training:
            self.drawn.append(noise)
        out: Tensor = self.linear(x) * (1 + 0.1 * noise)
        return out


def trainer_of(**options: object) -> Trainer:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Restless()
    train = Loader(Points(), UpdateSampler(Shuffled(12, 1), batch_size=4), seed=1)
    val = Loader(Points(), UpdateSampler(Sequential(12), batch_size=6), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(
        model,
        Regression(),
        optimizer,
        train,
        val,
        options=TrainerOptions(max_epochs=2, validate_every_n_epochs=None, **options),  # type: ignore[arg-type]
    )


def fitted(**options: object) -> Trainer:
    trainer = trainer_of(**options)
    trainer.fit()
    return trainer


def state(trainer: Trainer) -> tuple[object, ...]:
    _, keys, *rest = np.random.get_state()
    weights = [p.tolist() for p in trainer.model.parameters()]
    return weights, torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validate_every_n_steps": 1}, id="each-step"),
        pytest.param({"validate_every_n_steps": 4, "validate_at_start": 1}, id="at-start"),
    ],
)
def test_a_validation_changes_nothing_of_the_training(options: dict[str, object]) -> None:
    assert state(fitted(**options)) == state(fitted())


def test_what_is_drawn_is_a_function_of_seed_and_step() -> None:
    trainer = trainer_of(seed=5)
    model, evaluate = trainer.model, trainer.evaluate

    def drawn(step: int | None) -> list[float]:
        model.drawn = []  # type: ignore[assignment]
        evaluate(trainer.val_loader, "val", step=step)
        return model.drawn  # type: ignore[return-value]

    first = drawn(None)
    assert len(set(first)) == 2
    assert drawn(0) == first
    torch.rand(3)
    assert drawn(0) == first
    assert drawn(1) != first
    other = trainer_of(seed=6)
    other.evaluate(other.val_loader, "val")
    assert other.model.drawn != first


def test_an_evaluation_that_a_signal_ends_gives_the_generators_back() -> None:
    trainer = trainer_of()

    def signal_comes() -> None:
        trainer.state.signal = ("SIGTERM", 143)

    trainer.model.before_evaluation = signal_comes
    before = state(trainer)
    with pytest.raises(EvaluationAbandoned):
        trainer.evaluate(trainer.val_loader, "val")
    assert state(trainer) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_its_generator_too() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(device)
    with rng.keyed(device, 1):
        first = torch.rand(3, device=device)
    with rng.keyed(device, 1):
        assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
