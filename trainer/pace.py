"""What is due between two updates, by the options and the counters alone."""

from __future__ import annotations

from trainer.options import TrainerOptions
from trainer.state import TrainState


def is_done(options: TrainerOptions, state: TrainState) -> bool:
    """Return whether the horizon is reached."""
    epochs, steps = options.max_epochs, options.max_steps
    return (epochs is not None and state.epoch >= epochs) or (
        steps is not None and state.global_step >= steps
    )


def log_is_due(options: TrainerOptions, state: TrainState, unlogged: bool) -> bool:
    """Return whether to log; `unlogged`: something was added up since the epoch's last log line.

    So an epoch whose last update was skipped is logged as well.
    """
    step = state.global_step
    if not state.position and unlogged:
        return True
    regular = step % options.log_every_n_steps == 0
    return step > state.logged_at and (regular or not state.position or is_done(options, state))


def validation_is_due(options: TrainerOptions, state: TrainState) -> bool:
    """Return whether to validate, where there is something to validate on."""
    if state.global_step <= state.validated_at:
        return False
    epochs, steps = options.validate_every_n_epochs, options.validate_every_n_steps
    by_epoch = epochs and not state.position and not state.epoch % epochs
    by_step = steps and not state.global_step % steps
    return bool(by_epoch or by_step or is_done(options, state))
