"""A callback that notes when the first update is done; imports nothing that a run does not."""

import time
from pathlib import Path

from trainer.callback import Callback
from trainer.trainer import Trainer


class Mark(Callback):
    """Write the time, and the process's CPU seconds, at the end of the first update."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_update_end(self, trainer: Trainer) -> None:
        """Write once."""
        if trainer.is_main and trainer.state.updates == 1:
            self._path.write_text(f"{time.time()} {time.process_time()}")
