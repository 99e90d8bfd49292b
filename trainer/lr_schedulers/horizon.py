"""The horizon of a schedule: its length, which replaces `${total_steps}` in a node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from conf.errors import ConfigError, Problem
from trainer.lr_schedulers.warmup import Warmup

Interval = Literal["step", "epoch"]


class ScheduleError(ConfigError, ValueError):
    """An `lr_scheduler` section of the config is invalid."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of a schedule, in steps of the scheduler and in updates; None if unknown."""

    steps: int | None  # updates, or epochs if the scheduler is stepped once an epoch
    updates: int | None
    steps_per_epoch: int | None

    def fill(self, node: Any, key: str) -> Any:
        """Replace `${total_steps}` and `${steps_per_epoch}` in plain containers."""
        if isinstance(node, Mapping):
            return {k: self.fill(v, f"{key}.{k}") for k, v in node.items()}
        if isinstance(node, list | tuple):
            return [self.fill(v, key) for v in node]
        return self._fill_text(node, key) if isinstance(node, str) else node

    def _fill_text(self, text: str, key: str) -> Any:
        for word, length in (
            ("${total_steps}", self.steps),
            ("${steps_per_epoch}", self.steps_per_epoch),
        ):
            if text == word:
                return known(length, key)
            if word in text:
                text = text.replace(word, str(known(length, key)))
        return text

    def share(self, value: Any, key: str) -> int:
        """Return a step of the scheduler: `value`, or that fraction of the horizon."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"{value!r} is neither a step nor a fraction of the run"
            raise ScheduleError(Problem(key, message))
        if isinstance(value, int):
            return value
        if not 0 < value < 1:
            message = f"{value!r}: a fraction of the run must be between 0 and 1"
            raise ScheduleError(Problem(key, message))
        return round(value * known(self.steps, key))

    def phases(self, milestones: Sequence[int], count: int) -> list[Horizon]:
        """Return the horizons of `count` successive parts, which change at `milestones`."""
        if len(milestones) != count - 1:  # torch raises an error for this
            return [self] * count
        ends = [*milestones, self.steps]
        return [
            replace(self, steps=None if end is None else max(1, end - begin))
            for begin, end in zip([0, *milestones], ends, strict=True)
        ]


def known(length: int | None, key: str) -> int:
    """Return a length. Raises `ScheduleError` if it is None."""
    if length is None:
        message = "depends on the length of the run, which is not known"
        hint = "set trainer.max_epochs or trainer.max_steps"
        raise ScheduleError(Problem(key, message, hint))
    return length


def remaining(
    total_steps: int | None, steps_per_epoch: int | None, interval: Interval, warmup: Warmup
) -> Horizon:
    """Return the horizon of the run after the warm-up; it has at least one step."""
    if total_steps is None:
        return Horizon(None, None, steps_per_epoch)
    updates = max(1, total_steps - warmup.updates(steps_per_epoch))
    if interval == "step":
        return Horizon(updates, updates, steps_per_epoch)
    epochs = math.ceil(updates / steps_per_epoch) if steps_per_epoch else None
    return Horizon(epochs, updates, steps_per_epoch)


def refuse_to_wait(monitors: Sequence[str], has_data: bool, validates: bool) -> None:
    """Raise `ScheduleError` for a schedule that monitors a validation if there is none."""
    for monitor in monitors:
        if monitor.startswith("val/") and not (has_data and validates):
            reason = "no validation before the end" if has_data else "no validation set"
            message = f"{monitor}: there is {reason}, and the rates would never change"
            hint = "monitor train/loss, or choose a schedule without a metric"
            raise ScheduleError(Problem("lr_scheduler.monitor", message, hint))
