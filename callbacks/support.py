"""Helpers that several callbacks use: checks of options, and the metric that they monitor."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from regimen.conf.errors import ConfigError
from regimen.trainer.state import TrainState, direction_of, epoch_metric

if TYPE_CHECKING:  # the parent of a sweep compares metrics, and has not imported torch
    from torch import Tensor, nn

    from regimen.trainer.task import Task

AUTO = "auto"
logger = logging.getLogger("regimen.callbacks")


class CallbackError(ConfigError, ValueError):
    """An option of a callback is invalid, or does not fit the run."""


def require(condition: object, message: str) -> None:
    """Raise CallbackError with `message` unless the condition holds."""
    if not condition:
        raise CallbackError(message)


def check_least(least: float = 1, /, **options: float | None) -> None:
    """Raise CallbackError for options below `least`, infinite or NaN; None is allowed."""
    for name, value in options.items():
        is_allowed = value is None or least <= value < math.inf
        require(is_allowed, f"{name}={value}: choose a finite number of at least {least}")


def check_positive(**options: float) -> None:
    """Raise CallbackError for options that are 0, negative or NaN; infinity is allowed."""
    for name, value in options.items():
        require(value > 0, f"{name}={value}: choose more than 0")


def check_finite(**options: float) -> None:
    """Raise CallbackError for options that are infinite or NaN."""
    for name, value in options.items():
        require(math.isfinite(value), f"{name}={value}: choose a finite number")


def steps_of(key: str, value: float, total: int | None) -> int:
    """Return a number of updates or epochs; for a float up to 1.0 that share of `total`.

    Raises CallbackError for a value that is neither, and for a share of an unknown total.
    """
    if not value >= 0 or (value > 1 and value % 1 != 0):  # not 0 or more: NaN is neither
        raise CallbackError(
            f"{key}={value}: choose a whole number, or a share of the run up to 1.0"
        )
    if not isinstance(value, float) or value > 1:
        return int(value)
    if total is None:
        raise CallbackError(
            f"{key}={value} is a share of a run whose length is not known: give a number"
        )
    return int(value * total)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients of a model's parameters, by name."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.detach().clone()
    return gradients


def is_due(count: int, every: int | None) -> bool:
    """Return whether the `count`-th time is due: each `every`-th, or the 1st, 4th, 16th, 64th..."""
    if every is not None:
        return count % every == 0
    return (math.log2(count) / 2).is_integer()


class Monitor:
    """Compare values of the metric `name`.

    `name`: "auto" becomes the metric of `Task.monitor`, such as val/accuracy; None monitors
    nothing; train/loss becomes train/epoch_loss, the mean over an epoch. `mode`: min, max, or
    "auto", which follows from what the task says (`Task.modes`) or else from the metric's name, and
    is an error for unknown names where the values are `compared`.
    """

    def __init__(self, name: str | None, mode: str = AUTO, compared: bool = True) -> None:
        require(mode in ("min", "max", AUTO), f"mode={mode!r}: choose min, max or {AUTO}")
        self.name = None if name is None else epoch_metric(name)
        self._mode = mode
        self._compared = compared
        self._sign = 1

    def resolve(self, task: Task, stages: Iterable[str]) -> None:
        """Replace "auto" by the metric of the task on the first of `stages`; find the direction.

        Raises CallbackError if neither the task nor the name tells which values are better.
        """
        if self.name == AUTO:
            metric = task.monitor()
            stage = next(iter(stages), "val")
            self.name = None if metric is None else f"{stage}/{metric}"
        self.find_direction(task.modes())

    def find_direction(self, modes: Mapping[str, str]) -> None:
        """Find which values are better; `modes` as in `regimen.trainer.state.direction_of`."""
        if not self._compared or self.name is None:
            return
        mode: str | None = self._mode
        if mode == AUTO:
            mode = direction_of(self.name, modes)
        if mode is None:
            raise CallbackError(
                f"mode={AUTO}: is a larger {self.name} better? say mode=max or mode=min, or let "
                "the task's modes() say it"
            )
        require(mode in ("min", "max"), f"the task's modes() say {mode!r}: choose min or max")
        self._sign = -1
        if mode == "max":
            self._sign = 1

    @property
    def on_validation(self) -> bool:
        """Whether the metric is computed by a validation."""
        return self.name is not None and self.name.startswith("val/")

    def is_new(self, state: TrainState, last_step: int) -> bool:
        """Whether a boundary has a value of a validation or an epoch after step `last_step`."""
        if state.global_step <= last_step:
            return False
        if self.on_validation:
            return state.validated_at == state.global_step
        return state.position == 0  # an epoch has ended

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
        # Sorting is stable: the order of steps stays where values are equal.
        return sorted(sorted(values.items()), key=lambda pair: self.rank(pair[1]))
