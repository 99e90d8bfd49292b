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

    affects_result = False

    def __init__(self, hint_share: float = 0.3) -> None:
        require(0 <= hint_share <= 1, f"hint_share={hint_share}: choose a fraction from 0 to 1")
        self._hint_share = hint_share
        self._intervals = 0
        # The counters of the run at the last log line.
        self._samples = 0
        self._updates = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start counting here: the samples before a resume took no time of this process."""
        self._samples = trainer.state.samples
        self._updates = trainer.state.updates

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line."""
        state = trainer.state
        samples = state.samples - self._samples
        updates = state.updates - self._updates
        self._samples = state.samples
        self._updates = state.updates
        seconds = trainer.timer.total
        data_seconds = trainer.timer.data
        if seconds <= 0 or not updates:
            return {}
        data_share = data_seconds / seconds
        self._intervals += 1
        # The first interval includes the start of worker processes and is not representative.
        if self._intervals > 1 and data_share > self._hint_share:
            self._hint_share = 1.0
            logger.info(
                "%.0f%% of the time is spent waiting for data: set loader.num_workers=auto",
                100 * data_share,
            )
        return {
            "time/samples_per_second": samples / seconds,
            "time/step_seconds": seconds / updates,
            "time/data_wait": data_seconds / updates,
            "time/data_share": data_share,
        }
