"""The ramp in front of a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SHAPES = ("linear", "exponential")
_KEYS = ("steps", "epochs", "start_factor", "shape")


@dataclass(frozen=True, slots=True)
class Warmup:
    """Raise learning rates over `ticks` from `start_factor` of the schedule's first value to it.

    Tick t has the factor s + (1 - s) t / ticks (linear) or s ** (1 - t / ticks) (exponential).
    """

    ticks: int = 0
    every: Literal["step", "epoch"] = "step"  # what a tick is
    start_factor: float = 0.01
    shape: Literal["linear", "exponential"] = "linear"

    def factor(self, tick: int) -> float:
        """Return the share of the full learning rate at `tick`; 1 from `ticks` on."""
        if tick >= self.ticks:
            return 1.0
        if self.shape == "exponential":
            return float(self.start_factor ** (1 - tick / self.ticks))
        return self.start_factor + (1 - self.start_factor) * tick / self.ticks

    def updates(self, steps_per_epoch: int | None) -> int:
        """Return how many updates the ramp takes."""
        return self.ticks * (steps_per_epoch or 1) if self.every == "epoch" else self.ticks

    def epochs(self, steps_per_epoch: int | None) -> int:
        """Return how many whole epochs the ramp takes."""
        return (
            self.ticks
            if self.every == "epoch"
            else self.ticks // (steps_per_epoch or self.ticks + 1)
        )


def parse_warmup(
    node: Any, key: str, interval: str, steps_per_epoch: int | None, problems: list[str]
) -> Warmup:
    """Read `{steps | epochs, start_factor, shape}`; note what is wrong.

    Given in epochs, the ramp moves with every update, or once an epoch where the schedule does.
    """
    if node is None:
        return Warmup()
    if not isinstance(node, Mapping):
        problems.append(f"{key} must be a dict with steps or epochs, not {node!r}")
        return Warmup()
    problems += [
        f"{key}.{word} is unknown; there are {', '.join(_KEYS)}"
        for word in node
        if word not in _KEYS
    ]
    steps, epochs = node.get("steps") or 0, node.get("epochs") or 0
    start, shape = node.get("start_factor", 0.01), node.get("shape", "linear")
    before = len(problems)
    problems += _complaints(key, steps, epochs, start, shape)
    if epochs and steps_per_epoch is None and interval == "step":
        problems.append(f"{key}.epochs: the length of an epoch is not known; give steps")
    if len(problems) > before:
        return Warmup()
    if interval == "epoch" and not steps:
        return Warmup(round(epochs), "epoch", float(start), shape)
    return Warmup(steps or round(epochs * (steps_per_epoch or 0)), "step", float(start), shape)


def _complaints(key: str, steps: Any, epochs: Any, start: Any, shape: Any) -> list[str]:
    found = []
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        found.append(f"{key}.steps must be a number of updates, not {steps!r}")
    if not _is_number(epochs) or epochs < 0:
        found.append(f"{key}.epochs must be a number of epochs, not {epochs!r}")
    if steps and epochs:
        found.append(f"{key} has steps and epochs: give one of them")
    if shape not in SHAPES:
        found.append(f"{key}.shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    if not _is_number(start) or not 0 <= start <= 1 or (start == 0 and shape == "exponential"):
        found.append(
            f"{key}.start_factor must be from 0 to 1 (exponential: above 0), not {start!r}"
        )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
