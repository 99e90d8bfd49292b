"""Stop a run that no longer improves."""

import math
from collections.abc import Mapping

from callbacks.support import AUTO, Monitor, require
from conf.errors import problems_at
from trainer.callback import Callback
from trainer.trainer import Trainer


class EarlyStopping(Callback):
    """Stop after `patience` validations in a row without a better `monitor`.

    `patience`: None disables this. `min_delta`: the minimum improvement of a better value.
    `min_epochs`: no stop before this many epochs, whose validations are counted nevertheless.
    `check_finite`: stop as soon as the metric is NaN or infinite. A metric of the training
    (`train/loss`) is compared after every epoch, by its mean over the epoch, so that `patience`
    counts epochs.
    """

    persistent = ("best", "waited", "looked_at", "epoch", "last")

    def __init__(
        self,
        monitor: str = AUTO,
        mode: str = AUTO,
        patience: int | None = None,
        min_delta: float = 0.0,
        min_epochs: int = 0,
        check_finite: bool = True,
    ) -> None:
        few = f"patience={patience}: choose at least 1, or null for no stopping"
        require(patience is None or patience >= 1, few)
        require(min_delta >= 0, f"min_delta={min_delta}: choose 0 or more")
        self._monitor = Monitor(monitor, mode, compared=patience is not None)
        self._patience = patience
        self._min_delta = min_delta
        self._min_epochs = min_epochs
        self._check_finite = check_finite
        self.best: float | None = None
        self.waited = 0  # validations, or epochs, since the best one
        self.looked_at = 0  # step; a boundary that a signal interrupted is repeated
        self.epoch: int | None = None  # the epoch then
        self.last = 0.0  # and the value

    @property
    def monitor(self) -> str | None:
        """The name of the metric; None if there is none, or `auto` is not resolved yet."""
        return None if self._monitor.name == AUTO else self._monitor.name

    def setup(self, trainer: Trainer) -> None:
        """Resolve the metric. Raises CallbackError if the run does not compute it."""
        with problems_at(f"callbacks.{self.name}"):
            self._monitor.resolve(trainer)
        if self._patience:
            key, name = f"callbacks.{self.name}", self.monitor
            none = f"this task has no metric to monitor; set {key}.monitor"
            require(name is not None, f"{key}.patience={self._patience}: {none}")
            hint = f"monitor train/loss, or remove the callback with '~{key}'"
            there = trainer.val_loader is not None or not self._monitor.on_validation
            require(there, f"{key}.monitor={name}: there is no validation set; {hint}")

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat a stop that was due when the checkpoint was saved."""
        if self.epoch is None:  # a new run
            self.epoch = trainer.state.epoch
        if trainer.branched:  # other hyper-parameters may mend what was not finite
            self.last = 0.0
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare the metric of a validation."""
        if self._monitor.on_validation:
            self._look(trainer)

    def on_boundary(self, trainer: Trainer) -> None:
        """Compare the training metric of an epoch."""
        state = trainer.state
        at_end = not state.position and state.global_step > self.looked_at
        if at_end and self.monitor is not None and not self._monitor.on_validation:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        self.looked_at, self.epoch = trainer.state.global_step, trainer.state.epoch
        self.last = value = self._monitor.value(trainer.metrics)
        if self._monitor.better(value, self.best, self._min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._check_finite and not math.isfinite(self.last):
            trainer.state.request_stop(f"{self.monitor} is {self.last}")
        if self._patience is None or self.waited < self._patience:
            return
        # The epoch of the look: a resume between two looks must not stop a run.
        if self.epoch is not None and self.epoch >= self._min_epochs:
            best = "it was never a number" if self.best is None else f"best {self.best:.4g}"
            unit = "validation" if self._monitor.on_validation else "epoch"
            looks = f"{self.waited} {unit}{'s' * (self.waited != 1)}"
            trainer.state.request_stop(f"{self.monitor} has not improved in {looks} ({best})")
