"""How far and how often a trainer goes: the configuration's `trainer` group is its options."""

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from regimen.conf.check import check_options
from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.conf.schema_trainer import GradientNoiseConfig as GradientNoise
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.state import TrainState

__all__ = ["GradientNoise", "TrainerOptions", "count", "horizon"]

# What only `train` can do, which knows the data and may build an experiment several times.
_OF_COMMANDS = {
    "overfit_batches": "give a train_loader and a val_loader of these few batches",
    "limit_test_batches": "give trainer.evaluate(loader, 'test', limit=...)",
    "memory_limit": "give a number of gradient_accumulation_steps",
}


class OptionsError(ConfigError, ValueError):
    """Options that cannot be meant."""

    found_in = "the options"


@dataclass(kw_only=True, slots=True)
class TrainerOptions(TrainerConfig):
    """The options of a Trainer that is made in Python: those of the `trainer` group.

    Raises OptionsError, a ValueError, with all mistakes: what the group refuses, and what only the
    command `train` can do.
    """

    def __post_init__(self) -> None:
        raise_problems([*check_options(self), *self._ignored()], OptionsError)
        if isinstance(self.gradient_noise, dict):
            self.gradient_noise = GradientNoise(**self.gradient_noise)
        if self.error_if_nonfinite:
            self.on_nonfinite = "stop"

    def _ignored(self) -> list[Problem]:
        """List the options that a Trainer would ignore."""
        hints = {
            name: hint for name, hint in _OF_COMMANDS.items() if getattr(self, name) is not None
        }
        if self.gradient_accumulation_steps == "auto":
            hints["gradient_accumulation_steps"] = "give a number; only `train` finds the fewest"
        return [
            Problem(f"TrainerOptions.{name}", "has no effect on a Trainer made in Python", hint)
            for name, hint in hints.items()
        ]


def count(limit: int | float | None, whole: int) -> int:
    """Return how many of `whole` a limit leaves: a number, a fraction but at least 1, or all.

    A fraction is read as a decimal and rounded half up: 0.29 of 100 is 29, though the nearest
    binary float times 100 is less.
    """
    if limit is None:
        return whole
    if isinstance(limit, int):
        return min(limit, whole)
    return max(1, int((Decimal(str(limit)) * whole).to_integral_value(ROUND_HALF_UP)))


def batches_of(loader: Any, limit: int | float | None, key: str) -> int | None:
    """Return how many batches of a loader a limit leaves; None if the loader has no length.

    Raises OptionsError for a fraction of it then; `key` is that of the limit.
    """
    try:
        whole = len(loader)
    except TypeError:
        if isinstance(limit, float):
            raise OptionsError(
                key,
                f"{limit} is a fraction, and the loader has no length",
                "give a number of batches",
            ) from None
        return limit
    return count(limit, whole)


def validation_limit(options: TrainerConfig, loader: Any) -> int | None:
    """Return after how many batches a validation ends; None: with its loader."""
    limit = options.limit_val_batches
    if isinstance(limit, float):
        return batches_of(loader, limit, "trainer.limit_val_batches")
    return limit  # whatever length the loader says it has


def horizon(options: TrainerConfig, steps_per_epoch: int | None) -> int | None:
    """Return the number of updates of a run; None if only the time ends it."""
    return updates_left(options, TrainState(), steps_per_epoch)


def updates_left(
    options: TrainerConfig, state: TrainState, steps_per_epoch: int | None
) -> int | None:
    """Return the number of updates from here to the horizon; None if that is a time."""
    ends = []
    if options.max_steps is not None:
        ends.append(options.max_steps - state.global_step)
    if options.max_epochs is not None and steps_per_epoch is not None:
        ends.append((options.max_epochs - state.epoch) * steps_per_epoch - state.position)
    return max(0, min(ends)) if ends else None


def is_reached(options: TrainerConfig, state: TrainState) -> bool:
    """Return whether the horizon, a number of epochs or of updates, is reached."""
    if options.max_epochs is not None and state.epoch >= options.max_epochs:
        return True
    return options.max_steps is not None and state.global_step >= options.max_steps


def log_is_due(options: TrainerConfig, state: TrainState, has_epoch_means: bool) -> bool:
    """Return whether a boundary logs; `has_epoch_means`: whether this epoch has applied updates."""
    is_epoch_end = not state.position
    if is_epoch_end and has_epoch_means:
        return True  # an epoch whose last update was skipped is logged as well
    if state.global_step <= state.logged_at:
        return False
    is_regular = state.global_step % options.log_every_n_steps == 0
    return is_regular or is_epoch_end or is_reached(options, state)


def validation_is_due(options: TrainerConfig, state: TrainState) -> bool:
    """Return whether a boundary validates, in a training that has validation sets."""
    if state.global_step <= state.validated_at:
        return False
    epochs = options.validate_every_n_epochs
    if epochs and not state.position and not state.epoch % epochs:
        return True
    steps = options.validate_every_n_steps
    if steps and not state.global_step % steps:
        return True
    return is_reached(options, state)
