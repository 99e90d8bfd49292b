"""What contenders of ours need; imports nothing that a run does not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def train(
    model: nn.Module, optimizer: Optimizer, loader: Any, options: Mapping[str, Any], **others: Any
) -> None:
    """Classify by a Trainer with these of `TrainerOptions`."""
    task, given = Classification(others.pop("classes", 10)), TrainerOptions(**options)
    Trainer(model, task, optimizer, loader, options=given, **others).fit()


class Mark(Callback):
    """Write the time, and the process's CPU seconds, at the end of the first update."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_update_end(self, trainer: Trainer) -> None:
        """Write once."""
        if trainer.is_main and trainer.state.updates == 1:
            self._path.write_text(f"{time.time()} {time.process_time()}")
