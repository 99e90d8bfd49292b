"""How far and how often a trainer goes: the configuration's `trainer` group is its options."""

from decimal import ROUND_HALF_UP, Decimal

from regimen.conf.schema_trainer import GradientNoiseConfig as GradientNoise
from regimen.conf.schema_trainer import TrainerConfig as TrainerOptions

__all__ = ["GradientNoise", "TrainerOptions", "count", "horizon"]


def count(limit: int | float | None, whole: int) -> int:
    """Return how many of `whole` a limit leaves: a number, a fraction but at least 1, or all.

    A fraction is read as a decimal and rounded half up: 0.29 of 100 is 29, though the nearest
    binary float times 100 is less.
    """
    if limit is None or isinstance(limit, int):
        return whole if limit is None else min(limit, whole)
    return max(1, int((Decimal(str(limit)) * whole).to_integral_value(ROUND_HALF_UP)))


def horizon(options: TrainerOptions, steps_per_epoch: int | None) -> int | None:
    """Return the number of updates of a run; None if only the time ends it."""
    ends = [] if options.max_steps is None else [options.max_steps]
    if options.max_epochs is not None and steps_per_epoch is not None:
        ends.append(options.max_epochs * steps_per_epoch)
    return min(ends, default=None)
