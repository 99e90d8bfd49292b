"""Where the time of a training interval goes."""

import time


class Timer:
    """Split the wall time since the last `take` into waiting for data, evaluating and the rest."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new interval."""
        self._since = time.monotonic()
        self.data = 0.0  # seconds spent waiting for the next batch
        self.pause = 0.0  # seconds spent on what is not training: evaluation, checkpoints

    @property
    def total(self) -> float:
        """Seconds of training in the interval, waiting for data included."""
        return time.monotonic() - self._since - self.pause
