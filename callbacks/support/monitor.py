"""The metric that a callback monitors, and the comparison of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from callbacks.support.errors import CallbackError
from trainer.metric_names import epoch_metric

if TYPE_CHECKING:
    from trainer.trainer import Trainer

AUTO = "auto"
_SMALLER = {"loss", "error", "perplexity", "mae", "mse", "rmse", "nll", "wer", "cer"}
_LARGER = {
    "accuracy",
    "acc",
    "f1",
    "iou",
    "miou",
    "dice",
    "auc",
    "auroc",
    "map",
    "precision",
    "r2",
    "recall",
}


class Monitor:
    """Compare values of the metric `name`.

    `name`: "auto" becomes the metric of `Task.monitor`, such as val/accuracy; None monitors
    nothing; train/loss becomes train/epoch_loss, the mean over an epoch. `mode`: min, max, or
    "auto", which follows from the metric's name and is an error for unknown names where the values
    are `compared`.
    """

    def __init__(self, name: str | None, mode: str = AUTO, compared: bool = True) -> None:
        if mode not in ("min", "max", AUTO):
            raise CallbackError(f"mode={mode!r}: choose min, max or {AUTO}")
        self.name = None if name is None else epoch_metric(name)
        self._mode = mode
        self._compared = compared
        self._sign = 1 if name in (None, AUTO) else self._direction()

    def resolve(self, trainer: Trainer) -> None:
        """Replace "auto" by the metric of the task."""
        if self.name == AUTO:
            metric = trainer.task.monitor()
            self.name = None if metric is None else f"val/{metric}"
            self._sign = 1 if self.name is None else self._direction()

    def _direction(self) -> int:
        return _sign(self.name, self._mode) if self._compared else 1

    @property
    def on_validation(self) -> bool:
        """Whether the metric is computed by a validation."""
        return self.name is not None and self.name.startswith("val/")

    def better(self, value: float, than: float | None, min_delta: float = 0.0) -> bool:
        """Whether `value` improves on `than` by more than `min_delta`; NaN never does."""
        if math.isnan(value):
            return False
        return than is None or self._sign * (value - than) > min_delta

    def rank(self, value: float) -> float:
        """Return a key that sorts the best value first."""
        return -self._sign * value

    def best_first(self, values: Mapping[int, float]) -> list[tuple[int, float]]:
        """Return steps and their values, the best first; of equal values the earlier."""
        return sorted(sorted(values.items()), key=lambda pair: self.rank(pair[1]))

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the metric. Raises CallbackError with the available names if it is missing."""
        if self.name is None or self.name not in metrics:
            known = ", ".join(sorted(metrics)) or "none yet"
            raise CallbackError(f"monitor={self.name}: no such metric; there are: {known}")
        return metrics[self.name]


def _sign(name: str | None, mode: str) -> int:
    if mode != AUTO:
        return 1 if mode == "max" else -1
    words = re.split(r"[/_:]", (name or "").lower())
    for word in (*words, *(word.rstrip("0123456789") for word in words)):
        if word in _SMALLER | _LARGER:
            return 1 if word in _LARGER else -1
    raise CallbackError(f"mode={AUTO}: is a larger {name} better? say mode=max or mode=min")
