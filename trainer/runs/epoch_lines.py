"""What a run from Python prints where no callback shows its progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from regimen.trainer.callback import Callback, losses_of

EPOCH_LOSS = "train/epoch_loss"


class EpochLines(Callback):
    """Print the loss of each epoch and the metrics of each validation to stderr.

    A run from Python has it unless one of its callbacks shows the progress itself, as
    `regimen.callbacks.progress.Progress` does. `Trainer(..., verbose=False)` shows nothing.
    """

    shows_progress = True

    def on_log(self, trainer: Any, scalars: Mapping[str, float]) -> None:
        """Print the mean loss of an epoch that ends, or the metrics of a validation."""
        metrics = values_of_epoch(trainer, scalars)
        if not metrics or not trainer.is_main:
            return
        state = trainer.state
        epoch = epoch_text(trainer, state.epoch)
        line = f"epoch {epoch}, step {state.global_step}: {values_text(metrics)}"
        if trainer.run is not None:
            trainer.run.note(line)
        print(line, file=sys.stderr, flush=True)


def values_of_epoch(trainer: Any, values: Mapping[str, float]) -> dict[str, float]:
    """Return what is shown of an epoch: its mean losses, and the metrics of a validation."""
    losses = losses_of(trainer, EPOCH_LOSS)
    return {k: v for k, v in values.items() if k in losses or k.startswith("val/")}


def epoch_text(trainer: Any, epoch: int) -> str:
    """Return the number of an epoch, and of how many, if that is known."""
    max_epochs = trainer.options.max_epochs
    return str(epoch) if max_epochs is None else f"{epoch}/{max_epochs}"


def values_text(values: Mapping[str, float]) -> str:
    """Return names and values as one text, with four digits."""
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items())
