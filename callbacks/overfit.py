"""Say how long an overfitting run will take, and end it once the loss is near zero."""

import logging
import time
from collections.abc import Mapping

from callbacks.support import require
from trainer.callback import Callback
from trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_WARM = 2  # updates that are not timed: the first ones are slower


class Overfit(Callback):
    """Stop as soon as a logged train/loss is at most `threshold`.

    After the first updates the time that all of them will take is logged. A task without a
    train/loss, such as a GAN, runs to its end.
    """

    def __init__(self, threshold: float = 0.01) -> None:
        require(threshold > 0, f"threshold={threshold}: choose more than 0")
        self._threshold = threshold
        self._since: tuple[float, int] | None = None  # time and update at which timing began
        self._told = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat a stop that was due when the checkpoint was saved."""
        self._stop_if_due(trainer, trainer.metrics)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Look at the loss, and tell the time once."""
        updates, now, total = trainer.state.updates, time.monotonic(), trainer.total_steps
        if self._since is None and updates >= _WARM:
            self._since = (now, updates)
        elif self._since and total is not None and updates > self._since[1] and not self._told:
            self._told = True
            each = (now - self._since[0]) / (updates - self._since[1])
            message = "overfitting: %d updates of %.2g s each, %.0f s more at most; it ends before "
            message += "that where train/loss comes to %.4g"
            if trainer.is_main:
                _log.info(message, total, each, each * (total - updates), self._threshold)
        self._stop_if_due(trainer, scalars)

    def _stop_if_due(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        loss = scalars.get("train/loss")
        if loss is not None and loss <= self._threshold:
            text = f"train/loss is {loss:.4g}, near zero (callbacks.{self.name}.threshold)"
            trainer.state.request_stop(text)
