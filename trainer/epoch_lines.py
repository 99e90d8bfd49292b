"""What a run from Python tells where it was given no callbacks: a line for each epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.callback import Callback
from trainer.files.layout import pair_lines

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_EPOCH_LOSS = "train/epoch_loss"


class EpochLines(Callback):
    """Print the loss of each epoch and the metrics of each validation to stderr.

    `callbacks.progress.Progress` shows more; `Trainer(..., callbacks={})` shows nothing.
    """

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Print the mean loss of an epoch that ends."""
        if _EPOCH_LOSS in scalars:
            self._say(trainer, {_EPOCH_LOSS: scalars[_EPOCH_LOSS]})

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Print the metrics."""
        self._say(trainer, metrics)

    def _say(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        if trainer.is_main:
            state, last = trainer.state, trainer.options.max_epochs
            where = f"epoch {state.epoch}" + (f"/{last}" if last is not None else "")
            lines = pair_lines(f"{where}, step {state.global_step}", values)
            print(*lines, sep="\n", file=sys.stderr, flush=True)
