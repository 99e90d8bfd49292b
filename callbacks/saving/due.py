"""When a checkpoint is due, between two updates."""

from __future__ import annotations

from callbacks.support.errors import CallbackError
from trainer.state import TrainState


class Due:
    """Say whether it is time to save: after so many epochs, so many steps, or both; None: never."""

    def __init__(self, every_n_epochs: int | None, every_n_steps: int | None) -> None:
        for key, value in (("every_n_epochs", every_n_epochs), ("every_n_steps", every_n_steps)):
            if value is not None and value < 1:
                raise CallbackError(f"{key}={value}: choose at least 1, or null for never")
        self._epochs, self._steps = every_n_epochs, every_n_steps

    def at(self, state: TrainState) -> bool:
        """Return whether it is time at this state; a skipped update is no step."""
        by_step = self._steps and state.global_step % self._steps == 0
        by_epoch = self._epochs and state.epoch % self._epochs == 0
        applied = state.global_step and not state.skipped_in_a_row
        return bool((by_step and applied) or (by_epoch and not state.position))
