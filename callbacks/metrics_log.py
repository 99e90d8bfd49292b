"""Write every logged value to `metrics.jsonl`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.callback import Callback
from trainer.files.atomic import AppendLog
from trainer.runs.status import METRICS
from trainer.trainer import Trainer


class MetricsLog(Callback):
    """Append `{"step": .., "epoch": .., "train/loss": ..}`, one JSON object on each line.

    Several lines may have the same step; a (step, key) pair is written only the first time. `epoch`
    counts completed epochs. NaN and infinity, which JSON lacks, become null. A resumed run removes
    the lines that were written after its checkpoint.
    """

    of_run = True

    def __init__(self) -> None:
        self._path: Path | None = None
        self._log: AppendLog | None = None
        self._offset = 0
        self._step = -1
        self._keys: set[str] = set()  # already written for that step

    def setup(self, trainer: Trainer) -> None:
        """Open the file. Raises StorageError if it cannot be opened."""
        if trainer.run_dir is not None and trainer.is_main:
            self._path = trainer.run_dir / METRICS
            self._log = AppendLog(self._path)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remove the lines that were written after the checkpoint."""
        if self._log is not None:
            self._log.truncate(self._offset)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Append a line."""
        if self._path is None:
            return
        if self._log is None:  # the test, after the training
            self._log = AppendLog(self._path)
        step, epoch = trainer.log_point
        if step != self._step:
            self._step, self._keys = step, set()
        fresh = {key: value for key, value in scalars.items() if key not in self._keys}
        self._keys |= fresh.keys()
        if fresh:
            self._log.write(line(step, epoch, fresh))

    def teardown(self, trainer: Trainer) -> None:
        """Close the file; `on_log` opens it again."""
        if self._log is not None:
            self._offset = self._log.offset()
            self._log.close()
            self._log = None

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the file, and the keys of its last step."""
        offset = self._log.offset() if self._log is not None else self._offset
        return {"sizes": {METRICS: offset}, "step": self._step, "keys": sorted(self._keys)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the size of the file and the keys of its last step."""
        self._offset = state["sizes"][METRICS]
        self._step, self._keys = state["step"], set(state["keys"])


def line(step: int, epoch: int, values: Mapping[str, float]) -> str:
    """Return one line of the file."""
    numbers = {key: value if math.isfinite(value) else None for key, value in values.items()}
    return json.dumps({"step": step, "epoch": epoch, **numbers}, allow_nan=False)
