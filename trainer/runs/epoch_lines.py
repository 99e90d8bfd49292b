"""What a run from Python prints where no callback shows its progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from regimen.trainer.callback import Callback, losses_of


class EpochLines(Callback):
    """Print the loss of each epoch and the metrics of each validation to stderr.

    A run from Python has it unless one of its callbacks shows the progress itself, as
    `regimen.callbacks.progress.Progress` does. `Trainer(..., verbose=False)` shows nothing.
    """

    shows_progress = True

    def on_log(self, trainer: Any, scalars: Mapping[str, float]) -> None:
        """Print the mean loss of an epoch that ends, or the metrics of a validation."""
        losses = losses_of(trainer, "train/epoch_loss")
        metrics = {k: v for k, v in scalars.items() if k in losses or k.startswith("val/")}
        if not metrics or not trainer.is_main:
            return
        state = trainer.state
        epoch = f"epoch {state.epoch}"
        if trainer.options.max_epochs is not None:
            epoch += f"/{trainer.options.max_epochs}"
        values = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        line = f"{epoch}, step {state.global_step}: {values}"
        if trainer.run is not None:
            trainer.run.note(line)
        print(line, file=sys.stderr, flush=True)
