"""Stop a run that no longer improves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from regimen.callbacks.support import AUTO, CallbackError, Monitor, check_least
from regimen.conf.errors import problems_at
from regimen.trainer.callback import Callback
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer


@dataclass(eq=False)
class EarlyStopping(Callback):
    """Stop after `patience` validations in a row without a better `monitor`.

    `patience`: None disables this. `min_delta`: the minimum improvement of a better value.
    `min_epochs`: no stop before this many epochs, whose validations are counted nevertheless.
    `check_finite`: stop as soon as the metric is NaN or infinite. A metric of the training
    (`train/loss`) is compared after every epoch, by its mean over the epoch, so that `patience`
    counts epochs.
    """

    monitor: str | None = AUTO  # its name; None if the task has none
    mode: str = AUTO
    patience: int | None = None
    min_delta: float = 0.0
    min_epochs: int = 0
    check_finite: bool = True
    persistent = ("best", "waited", "looked_at", "epoch", "last")

    def __post_init__(self) -> None:
        check_least(patience=self.patience)
        check_least(0, min_delta=self.min_delta, min_epochs=self.min_epochs)
        self._judge = Monitor(self.monitor, self.mode, compared=self.patience is not None)
        self.best: float | None = None
        self.waited = 0  # validations, or epochs, since the best one
        # The step, the epoch and the value of the last comparison. A boundary that a signal
        # interrupted is repeated by the resumed run, and must not be compared twice.
        self.looked_at = 0
        self.epoch = 0
        self.last = 0.0

    def check_task(self, task: Task, stages: Iterable[str]) -> None:
        """Raise ConfigError if it is not known which values of the metric are better."""
        with problems_at(f"callbacks.{self.name}"):
            self._judge.resolve(task, stages)

    def setup(self, trainer: Trainer) -> None:
        """Resolve the metric. Raises CallbackError if the run does not compute it."""
        key = f"callbacks.{self.name}"
        self.check_task(trainer.task, trainer.val_loaders)
        self.monitor = self._judge.name
        if self.patience is None:
            return
        if self.monitor is None:
            raise CallbackError(
                f"{key}.patience={self.patience}: this task has no metric to monitor; set "
                f"{key}.monitor"
            )
        if self._judge.on_validation and not trainer.val_loaders:
            raise CallbackError(
                f"{key}.monitor={self.monitor}: there is no validation set; monitor train/loss, or "
                f"remove the callback with '~{key}'"
            )

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat a stop that was due when the checkpoint was saved."""
        if trainer.branched:  # other hyper-parameters may mend what was not finite
            self.last = 0.0
        self._stop_if_due(trainer)

    def on_boundary(self, trainer: Trainer) -> None:
        """Compare the metric of a validation, or the training metric of an epoch."""
        state = trainer.state
        metrics = trainer.metrics
        if self.monitor is None or not self._judge.is_new(state, self.looked_at):
            return
        self.looked_at = state.global_step
        self.epoch = state.epoch
        if self.monitor not in metrics:
            raise CallbackError(
                f"monitor={self.monitor}: no such metric; there are: {', '.join(sorted(metrics))}"
            )
        self.last = metrics[self.monitor]
        if self._judge.better(self.last, self.best, self.min_delta):
            self.best = self.last
            self.waited = 0
        else:
            self.waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.check_finite and not math.isfinite(self.last):
            trainer.state.request_stop(f"{self.monitor} is {self.last}")
        if self.patience is None or self.waited < self.patience:
            return
        # The epoch of the last comparison, not of now: a resume between two comparisons must not
        # stop a run that went on without it.
        if self.epoch < self.min_epochs:
            return
        unit = "validation" if self._judge.on_validation else "epoch"
        if self.waited != 1:
            unit += "s"
        best = "it was never a number" if self.best is None else f"best {self.best:.4g}"
        trainer.state.request_stop(
            f"{self.monitor} has not improved in {self.waited} {unit} ({best})"
        )
