"""Log how fast the training is, and say so when it waits for its data."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from callbacks.support.errors import CallbackError
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Throughput(Callback):
    """Add samples a second, seconds an update, and the part of these spent waiting for data.

    They are `time/samples_per_second`, `time/step_seconds`, `time/data_wait` and `time/data_share`.

    Evaluations and checkpoints are not counted. `hint_share`: share of the time spent waiting for
    data from which on it is worth a hint, given once; 1 gives none.
    """

    def __init__(self, hint_share: float = 0.3) -> None:
        if not 0 <= hint_share <= 1:
            raise CallbackError(f"hint_share={hint_share}: choose a share from 0 to 1")
        self._hint_share = hint_share
        self._intervals = 0
        self._samples = 0
        self._updates = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count from here: a resumed run has seen samples that cost this one no time."""
        self._samples, self._updates = trainer.state.samples, trainer.state.updates

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the figures since the last log line."""
        state, seconds, waited = trainer.state, trainer.timer.total, trainer.timer.data
        samples, updates = state.samples - self._samples, state.updates - self._updates
        self._samples, self._updates = state.samples, state.updates
        if seconds <= 0 or not updates:
            return {}
        self._hint(waited / seconds)
        return {
            "time/samples_per_second": samples / seconds,
            "time/step_seconds": seconds / updates,
            "time/data_wait": waited / updates,
            "time/data_share": waited / seconds,
        }

    def _hint(self, share: float) -> None:
        self._intervals += 1
        # The first interval waits for worker processes to start: that says nothing of the rest.
        if self._intervals < 2 or share <= self._hint_share:
            return
        self._hint_share = 1.0
        _log.info(
            "%.0f%% of the time is spent waiting for data: raise loader.num_workers", 100 * share
        )
