"""The warm-up before a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conf.errors import Problem

SHAPES = ("linear", "exponential")
_KEYS = ("steps", "epochs", "start_factor", "shape")


@dataclass(frozen=True, slots=True)
class Warmup:
    """Raise learning rates over `ticks` from `start_factor` times their first value to it.

    The factor at tick t is s + (1 - s) t / ticks (linear) or s ** (1 - t / ticks) (exponential).
    """

    ticks: int = 0
    every: Literal["step", "epoch"] = "step"  # the unit of `ticks`
    start_factor: float = 0.01
    shape: Literal["linear", "exponential"] = "linear"

    def factor(self, tick: int) -> float:
        """Return the factor of the learning rate at `tick`; 1 from `ticks` on."""
        if tick >= self.ticks:
            return 1.0
        if self.shape == "exponential":
            return float(self.start_factor ** (1 - tick / self.ticks))
        return self.start_factor + (1 - self.start_factor) * tick / self.ticks

    def updates(self, steps_per_epoch: int | None) -> int:
        """Return the number of updates of the warm-up."""
        return self.ticks * (steps_per_epoch or 1) if self.every == "epoch" else self.ticks

    def epochs(self, steps_per_epoch: int | None) -> int:
        """Return the number of complete epochs of the warm-up."""
        return (
            self.ticks
            if self.every == "epoch"
            else self.ticks // (steps_per_epoch or self.ticks + 1)
        )


def parse_warmup(
    node: Any, key: str, interval: str, steps_per_epoch: int | None, problems: list[Problem]
) -> Warmup:
    """Parse `{steps | epochs, start_factor, shape}`; append to `problems`.

    With `epochs` the factor changes after every update, or once an epoch if the schedule does.
    """
    if node is None:
        return Warmup()
    if not isinstance(node, Mapping):
        problems.append(Problem(key, f"must be a dict with steps or epochs, not {node!r}"))
        return Warmup()
    problems += [
        Problem(f"{key}.{word}", "unknown key", f"there are {', '.join(_KEYS)}")
        for word in node
        if word not in _KEYS
    ]
    steps, epochs = node.get("steps") or 0, node.get("epochs") or 0
    start, shape = node.get("start_factor", 0.01), node.get("shape", "linear")
    before = len(problems)
    problems += _complaints(key, steps, epochs, start, shape)
    if epochs and steps_per_epoch is None and interval == "step":
        message = "the length of an epoch is not known"
        problems.append(Problem(f"{key}.epochs", message, "give steps"))
    if len(problems) > before:
        return Warmup()
    if interval == "epoch" and not steps:
        return Warmup(round(epochs), "epoch", float(start), shape)
    return Warmup(steps or round(epochs * (steps_per_epoch or 0)), "step", float(start), shape)


def _complaints(key: str, steps: Any, epochs: Any, start: Any, shape: Any) -> list[Problem]:
    found = []
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        found.append(Problem(f"{key}.steps", f"must be a number of updates, not {steps!r}"))
    if not _is_number(epochs) or epochs < 0:
        found.append(Problem(f"{key}.epochs", f"must be a number of epochs, not {epochs!r}"))
    if steps and epochs:
        found.append(Problem(key, "has steps and epochs", "remove one of the two"))
    if shape not in SHAPES:
        message = f"must be one of {', '.join(SHAPES)}, not {shape!r}"
        found.append(Problem(f"{key}.shape", message))
    if not _is_number(start) or not 0 <= start <= 1 or (start == 0 and shape == "exponential"):
        message = f"must be from 0 to 1 (exponential: above 0), not {start!r}"
        found.append(Problem(f"{key}.start_factor", message))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
