"""What contenders of ours need; imports nothing that a run does not."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from regimen.trainer.callback import Callback
from regimen.trainer.options import TrainerOptions
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer


def train(
    model: nn.Module, optimizer: Optimizer, loader: Any, options: Mapping[str, Any], **others: Any
) -> None:
    """Train for an epoch by a Trainer with these of `TrainerOptions`: classify, or another task."""
    task, given = others.pop("task", Classification(10)), TrainerOptions(max_epochs=1, **options)
    Trainer(model, task, optimizer, loader, options=given, **others).fit()


class AfterUpdate(Callback):
    """Call a function after each update."""

    def __init__(self, function: Callable[[Trainer], object]) -> None:
        self._function = function

    def on_update_end(self, trainer: Trainer) -> None:
        """Call it."""
        self._function(trainer)


class Mark(Callback):
    """Write the time, and the process's CPU seconds, at the end of the first update."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_update_end(self, trainer: Trainer) -> None:
        """Write once."""
        if trainer.is_main and trainer.state.updates == 1:
            self._path.write_text(f"{time.time()} {time.process_time()}")
