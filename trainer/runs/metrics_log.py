"""`metrics.jsonl`: what a run logs, a line for each log point."""

from collections.abc import Mapping
from typing import Any

from regimen.trainer.callback import Callback, Trainer
from regimen.trainer.files.atomic import AppendLog, as_json
from regimen.trainer.runs.status import METRICS


class MetricsLog(Callback):
    """Append `{"step": .., "epoch": .., "train/loss": ..}`, one JSON object on each line.

    Several lines may have the same step; a (step, key) pair is written only the first time. `epoch`
    counts completed epochs. NaN and infinity, which JSON lacks, become null. A resumed run removes
    the lines that were written after its checkpoint.
    """

    of_run = True
    persistent = ("sizes", "step", "keys")

    def __init__(self) -> None:
        self._log: AppendLog | None = None
        self.sizes = {METRICS: 0}
        self.step = -1
        self.keys = list[str]()  # already written for that step

    def setup(self, trainer: Trainer) -> None:
        """Open the file. Raises StorageError if it cannot be opened."""
        if trainer.run_dir is not None and trainer.is_main:
            self._log = AppendLog(trainer.run_dir / METRICS)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remove the lines that were written after the checkpoint."""
        if self._log is not None:
            self._log.truncate(self.sizes[METRICS])

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Append a line."""
        is_training = self._log is not None
        if not is_training:  # the test logs after the training, when the file is closed
            self.setup(trainer)
        if self._log is None:
            return
        step, epoch = trainer.log_point
        if step != self.step:
            self.step = step
            self.keys = []
        new = {key: value for key, value in scalars.items() if key not in self.keys}
        if new:
            self.keys += new
            self._log.write(as_json({"step": step, "epoch": epoch, **new}))
        if not is_training:  # a further `fit` goes on behind this line
            self.teardown(trainer)

    def teardown(self, trainer: Trainer) -> None:
        """Close the file; `on_log` opens it again."""
        if self._log is not None:
            self.sizes = {METRICS: self._log.offset()}
            self._log.close()
            self._log = None

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the file, and the keys of its last step."""
        if self._log is not None:
            self.sizes = {METRICS: self._log.offset()}
        return super().state_dict()
