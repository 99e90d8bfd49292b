"""Tests that need a GPU: no step of a task, no metric and no noise waits for it (I6)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from models.gan import GAN as Networks  # noqa: N811
from trainer.options import GradientNoise, TrainerOptions
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.tasks.gan import GAN
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.losses import Term, vector
from trainer.tasks.metrics import PerClassAccuracy
from trainer.tasks.multilabel import MultiLabel
from trainer.tasks.penalties import GradientPenalty
from trainer.tasks.regression import Regression
from trainer.tasks.segmentation import Segmentation
from trainer.update.gradients import add_noise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@contextmanager
def not_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def penalised() -> Task:
    score = nn.CrossEntropyLoss(reduction="sum")
    terms = {
        "weighted": nn.CrossEntropyLoss(weight=vector([1, 2, 3])),
        "penalty": Term(GradientPenalty(loss=score), 0.1),
    }
    return Classification(3, terms, metrics={"each": PerClassAccuracy(3)})


CASES: dict[str, Callable[[], tuple[Task, nn.Module, Any]]] = {
    "classification": lambda: (
        penalised(),
        nn.Linear(5, 3),
        (torch.randn(8, 5), torch.randint(3, (8,))),
    ),
    "regression": lambda: (Regression(), nn.Linear(5, 1), (torch.randn(8, 5), torch.randn(8))),
    "multilabel": lambda: (MultiLabel(), nn.Linear(5, 3), (torch.randn(8, 5), torch.ones(8, 3))),
    "segmentation": lambda: (
        Segmentation(3),
        nn.Conv2d(1, 3, 3, padding=1),
        (torch.randn(4, 1, 8, 8), torch.randint(3, (4, 8, 8))),
    ),
    "language": lambda: (
        LanguageModel(4),
        nn.Embedding(4, 4),
        (torch.randint(4, (4, 7)), torch.randint(4, (4, 7))),
    ),
    "gan": lambda: (
        GAN(r1=1.0),
        Networks(image_size=8, latent_dim=5, width=4),
        (torch.randn(4, 1, 8, 8), torch.randn(4, 5)),
    ),
}


def step(task: Task, model: nn.Module, batch: Any) -> None:
    for turn in task.turns or [""]:
        output = task.turn_step(model, batch, turn) if turn else task.training_step(model, batch)
        terms = output.loss.values() if isinstance(output.loss, dict) else [output.loss]
        sum(term.mean() for term in terms).backward()  # type: ignore[union-attr]
    task.counts(batch)
    with torch.no_grad():
        task.evaluation_step(model, batch)


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in CASES])
def test_a_step_does_not_wait(name: str) -> None:
    task, model, batch = CASES[name]()
    model.to(CUDA)
    task.to(CUDA)
    batch = tuple(part.to(CUDA) for part in batch)
    step(task, model, batch)  # the first one sets kernels up
    with not_waiting():
        step(task, model, batch)
    for metric in task.metrics().values():
        metric.compute()


def test_noise_does_not_wait_and_repeats_itself() -> None:
    parameter = nn.Parameter(torch.zeros(100, device=CUDA))
    options = TrainerOptions(gradient_noise=GradientNoise(eta=0.1, gamma=0.5))
    drawn = []
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        with not_waiting():
            add_noise(options, [parameter], update=3)
        drawn.append(parameter.grad.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert drawn[0].std() > 0
