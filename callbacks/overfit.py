"""End an overfitting run once its loss is near zero."""

from collections.abc import Mapping

from regimen.callbacks.support import check_finite, check_positive
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer


class Overfit(Callback):
    """Stop as soon as a logged train/loss is at most `threshold`.

    A task without a train/loss, such as a GAN, runs to its end.
    """

    def __init__(self, threshold: float = 0.01) -> None:
        check_positive(threshold=threshold)
        check_finite(threshold=threshold)
        self._threshold = threshold

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat a stop that was due when the checkpoint was saved."""
        self.on_log(trainer, trainer.metrics)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Stop if the loss is small enough."""
        loss = scalars.get("train/loss")
        if loss is not None and loss <= self._threshold:
            trainer.state.request_stop(
                f"train/loss is {loss:.4g}, near zero (callbacks.{self.name}.threshold)"
            )
