"""The parts of a trainer that updates and evaluation use."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from trainer.callback import Hooks
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions
from trainer.state import TrainState
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.timer import Timer
from trainer.update.precision import Precision


class Parts(Protocol):
    """A model in its three forms and what it is trained with; implemented by the trainer."""

    model: nn.Module  # as the user wrote it
    compiled: nn.Module  # the same, or compiled
    wrapped: nn.Module  # for training: the compiled one in the strategy's wrapper
    task: Task
    optimizers: Optimizers
    strategy: Strategy
    precision: Precision
    options: TrainerOptions
    state: TrainState
    timer: Timer
    hooks: Hooks

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
