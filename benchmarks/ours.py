"""A Trainer for classification as the benchmarks need it, and batches that lie ready for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


class Endless:
    """The same batch without end."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


def classifier(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    callbacks: Mapping[str, Callback],
    folder: Path | None = None,
    *,
    classes: int = 10,
    options: Mapping[str, Any],
    **others: Any,
) -> Trainer:
    """Return a Trainer with these of `TrainerOptions`."""
    return Trainer(
        model,
        Classification(classes),
        optimizer,
        loader,
        callbacks=dict(callbacks),
        options=TrainerOptions(**options),
        run_dir=folder,
        **others,
    )
