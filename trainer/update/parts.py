"""What the loop's two halves, updates and evaluation, work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer.nested import to_device
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions
from trainer.state import TrainState
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.update.precision import Precision


@dataclass(frozen=True, slots=True)
class Parts:
    """A model in its three forms, and the trainer's collaborators."""

    model: nn.Module  # as the user wrote it
    compiled: nn.Module  # the same, or compiled
    wrapped: nn.Module  # what training calls: the compiled one in the strategy's wrapper
    task: Task
    optimizers: Optimizers
    strategy: Strategy
    precision: Precision
    options: TrainerOptions
    state: TrainState

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        return to_device(
            batch, self.strategy.device, self.precision.dtype, self.options.channels_last
        )
