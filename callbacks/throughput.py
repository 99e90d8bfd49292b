"""Log the speed of the training, with a hint if it waits for data."""

from regimen.callbacks.support import logger, require
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer


class Throughput(Callback):
    """Log samples per second, seconds per update, and the time spent waiting for data.

    The keys are `time/samples_per_second`, `time/step_seconds`, `time/data_wait` (seconds per
    update) and `time/data_share` (a fraction of the time).

    Evaluations and checkpoints are not counted. `hint_share`: log a hint, once, if a greater
    fraction of the time is spent waiting for data; 1 disables it.
    """

    def __init__(self, hint_share: float = 0.3) -> None:
        require(0 <= hint_share <= 1, f"hint_share={hint_share}: choose a fraction from 0 to 1")
        self._hint_share = hint_share
        self._intervals = self._samples = self._updates = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start counting here: the samples before a resume took no time of this process."""
        self._samples, self._updates = trainer.state.samples, trainer.state.updates

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line."""
        state, seconds, waited = trainer.state, trainer.timer.total, trainer.timer.data
        samples, updates = state.samples - self._samples, state.updates - self._updates
        self._samples, self._updates = state.samples, state.updates
        if seconds <= 0 or not updates:
            return {}
        share, self._intervals = waited / seconds, self._intervals + 1
        # The first interval includes the start of worker processes and is not representative.
        if self._intervals > 1 and share > self._hint_share:
            self._hint_share = 1.0
            message = "%.0f%% of the time is spent waiting for data: set loader.num_workers=auto"
            logger.info(message, 100 * share)
        return {
            "time/samples_per_second": samples / seconds,
            "time/step_seconds": seconds / updates,
            "time/data_wait": waited / updates,
            "time/data_share": share,
        }
