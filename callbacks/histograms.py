"""Histograms of the weights in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from callbacks.support.errors import CallbackError
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Histograms(Callback):
    """Log a histogram of every parameter, `weights/<name>`, every `every_n_epochs` epochs."""

    def __init__(self, every_n_epochs: int = 1, bins: int = 64) -> None:
        if every_n_epochs < 1 or bins < 1:
            raise CallbackError(f"every_n_epochs={every_n_epochs}, bins={bins}: at least 1")
        self._every_n_epochs = every_n_epochs
        self._bins = bins

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Log the histograms."""
        if trainer.state.epoch % self._every_n_epochs:
            return
        for name, parameter in trainer.model.named_parameters():
            trainer.log_histogram(f"weights/{name}", parameter, self._bins)
