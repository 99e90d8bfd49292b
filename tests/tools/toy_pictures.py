"""A small run on images, and a callback that keeps what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

CLASSES = 3


class Gallery(Callback):
    """Keep what is shown: name to (step, value) pairs."""

    def __init__(self) -> None:
        self.shown: dict[str, list[tuple[int, Any]]] = {}

    def on_media(self, trainer: Any, name: str, media: Any) -> None:
        self.shown.setdefault(name, []).append((trainer.log_point.step, media))

    def steps(self, name: str) -> list[int]:
        return [step for step, _ in self.shown[name]]


def images(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 6, 1, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (count, 6), generator=generator)
    return list(zip(pixels, labels, strict=True))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def trainer_of(
    callbacks: Mapping[str, Callback],
    run_dir: Path | None = None,
    *,
    task: Task | None = None,
    model: nn.Module | None = None,
    train: Any = None,
    val: Any = None,
    optimizer: Any = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(1)
    model = model or network()
    return Trainer(
        model,
        task or Classification(CLASSES),
        optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        train or images(3, 0),
        val or images(2, 1),
        strategy=Strategy("cpu"),
        callbacks=callbacks,
        options=TrainerOptions(**{"max_epochs": 4, "log_every_n_steps": 2, **options}),
        run_dir=run_dir,
    )
