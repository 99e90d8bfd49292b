"""A small regression with BatchNorm, trained by the real trainer, and what a resume is made of."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer import snapshot
from trainer.callback import Callback, Results
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.task import StepOutput, Task
from trainer.trainer import Trainer

MakeTrainer = Callable[..., Trainer]


class Regression(Task):
    """Mean squared error; the "accuracy" is the share of small errors."""

    def metric_names(self) -> list[str]:
        return ["loss", "accuracy"]

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        errors = (model(inputs) - targets).square().mean(1)
        return StepOutput(loss=errors, sums={"accuracy": ((errors < 1).sum(), len(errors))})


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


def make_batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, 4, generator=generator, dtype=torch.float64)
    return [(x, x[:, :2] * 2 + 1) for x in inputs]


@pytest.fixture
def make_trainer() -> MakeTrainer:
    """Return a function that builds a trainer: 5 updates an epoch, 2 epochs."""

    def make(
        callbacks: Mapping[str, Callback],
        run_dir: Path | None = None,
        *,
        model: nn.Module | None = None,
        lr: float = 0.05,
        validated: bool = True,
        batches: list[Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Trainer:
        model = model or make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        if run_dir is not None:
            run_dir.mkdir(exist_ok=True)
        return Trainer(
            model,
            Regression(),
            optimizer,
            batches or make_batches(5, seed=0),
            make_batches(2, seed=1) if validated else None,
            scheduler(optimizer) if scheduler else None,
            Strategy("cpu"),
            callbacks=callbacks,
            options=TrainerOptions(**{"max_epochs": 2, "log_every_n_steps": 2, **options}),
            run_dir=run_dir,
        )

    return make


class StopAt(Callback):
    """End a run after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_update_end(self, trainer: Trainer) -> None:
        if trainer.state.global_step == self._step:
            trainer.state.request_stop("SIGTERM", 143)


@pytest.fixture
def stop_at() -> Callable[[int], Callback]:
    """Return the callback that ends a run after a step."""
    return StopAt


@pytest.fixture
def carry_over() -> Callable[[Trainer, Trainer], None]:
    """Return a function that makes the second trainer go on where the first one is."""

    def carry(source: Trainer, target: Trainer) -> None:
        file = io.BytesIO()
        torch.save(snapshot.take(source), file)
        file.seek(0)
        snapshot.restore(target, torch.load(file, weights_only=True))

    return carry


@pytest.fixture
def run_twice(make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any) -> Any:
    """Return a function that trains `whole`, and `cut` with an interruption and a process lost."""

    def run(make: Callable[[str], Callback], cut: int) -> None:
        whole = make_trainer({"tracker": make("whole")}, tmp_path / "whole")
        whole.fit()
        whole.end(Results("finished"))
        first = make_trainer({"tracker": make("cut"), "stop": stop_at(cut)}, tmp_path / "cut")
        second, third = (make_trainer({"tracker": make("cut")}, tmp_path / "cut") for _ in "23")
        first.fit()
        first.end(Results("preempted", code=143))
        carry_over(first, second)
        carry_over(first, third)
        second.fit()  # its checkpoint is lost: that of the first one still counts
        second.end(Results("failed", code=1))
        third.fit()
        third.end(Results("finished"))

    return run
