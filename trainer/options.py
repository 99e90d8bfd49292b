"""How far and how often a trainer goes: the configuration's `trainer` group is its options."""

from decimal import ROUND_HALF_UP, Decimal

from conf.schema_trainer import GradientNoiseConfig as GradientNoise
from conf.schema_trainer import TrainerConfig as TrainerOptions

__all__ = ["GradientNoise", "TrainerOptions", "count", "horizon"]


def count(limit: int | float, whole: int) -> int:
    """Return a limit as a count: an int as it is, a float as a fraction of `whole`, at least 1.

    A fraction is read as a decimal and rounded half up: 0.29 of 100 is 29, though the nearest
    binary float times 100 is less.
    """
    if isinstance(limit, int):
        return min(limit, whole)
    share = (Decimal(str(limit)) * whole).to_integral_value(ROUND_HALF_UP)
    return max(1, int(share))


def horizon(
    max_epochs: int | None, max_steps: int | None, steps_per_epoch: int | None
) -> int | None:
    """Return the number of updates of a run; None if only the time ends it."""
    ends = [max_steps] if max_steps is not None else []
    if max_epochs is not None and steps_per_epoch is not None:
        ends.append(max_epochs * steps_per_epoch)
    return min(ends, default=None)
