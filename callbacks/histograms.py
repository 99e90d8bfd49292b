"""Histograms of weights and gradients."""

from dataclasses import dataclass

from torch import Tensor

from regimen.callbacks.support import check_least, gradients_of
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer


@dataclass(eq=False)
class Histograms(Callback):
    """Log a histogram of every parameter, `weights/<name>`, every `every_n_epochs` epochs.

    With `gradients` also `gradients/<name>`: those of the epoch's last update, clipped, which are
    copied for it. A stream of unknown length has none.
    """

    every_n_epochs: int = 1
    bins: int = 64
    gradients: bool = True
    supports_sharding = False

    def __post_init__(self) -> None:
        check_least(every_n_epochs=self.every_n_epochs, bins=self.bins)
        self._gradients = dict[str, Tensor]()

    def on_gradients(self, trainer: Trainer) -> None:
        """Copy the gradients of an epoch's last update."""
        if not self.gradients or not trainer.is_main:
            return
        state = trainer.state
        is_last = state.position + 1 == trainer.steps_per_epoch
        if is_last and (state.epoch + 1) % self.every_n_epochs == 0:
            self._gradients |= gradients_of(trainer.model)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Log the histograms."""
        gradients = self._gradients
        self._gradients = {}
        if trainer.state.epoch % self.every_n_epochs:
            return
        for name, parameter in trainer.model.named_parameters():
            trainer.log_histogram(f"weights/{name}", parameter, self.bins)
        for name, gradient in gradients.items():
            trainer.log_histogram(f"gradients/{name}", gradient, self.bins)
