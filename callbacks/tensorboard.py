"""Write logged values to TensorBoard; the x axis is the number of applied updates."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from callbacks.support.errors import CallbackError
from callbacks.support.event_file import EventFile, rewind
from callbacks.support.hparams import read_hparams, session_end, session_start
from trainer.callback import Callback
from trainer.files.storage import storage_error

if TYPE_CHECKING:
    from trainer.trainer import Trainer

FOLDER = "tensorboard"
_log = logging.getLogger(__name__)


class TensorBoard(Callback):
    """Write scalars and hyper-parameters to `tensorboard/` in the run directory.

    `hparams`: globs over the dotted keys of the run's `config.yaml`; the matching settings are
    shown in TensorBoard's HParams tab with the run's last metrics. A full disk causes a warning,
    and the run continues.
    """

    of_run = True

    def __init__(self, hparams: Sequence[str] = ()) -> None:
        if isinstance(hparams, str):  # a string is a Sequence as well
            raise CallbackError(f"hparams={hparams!r}: give a list of globs, such as [{hparams}]")
        self._hparams = hparams
        self._folder: Path | None = None
        self._file: EventFile | None = None
        self._sizes: dict[str, int] = {}  # of the files of earlier processes
        self._warned = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        if trainer.run_dir is None or not trainer.is_main:
            return
        self._folder = trainer.run_dir / FOLDER
        self._try(lambda: self._begin(trainer))
        _log.info("follow the run: %s", command(self._folder))

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.scalars(trainer.state.global_step, scalars))

    def write(self, step: int, summary: Summary) -> None:
        """Write a summary (an image, a histogram) for another callback."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.summary(step, summary))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close the session of the HParams tab."""
        self.write(0, session_end(failed=False))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Mark the session as failed."""
        self.write(0, session_end(failed=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the files and their sizes."""
        own = {self._file.path.name: self._file.size} if self._file is not None else {}
        return {"sizes": {**self._sizes, **own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what has been written."""
        self._sizes = dict(state["sizes"])

    def _begin(self, trainer: Trainer) -> None:
        assert self._folder is not None
        assert trainer.run_dir is not None
        rewind(self._folder, self._sizes)
        self._file = EventFile(self._folder, len(self._sizes))
        if trainer.resumed:
            self._file.purge(trainer.state.global_step + 1)
        hparams = read_hparams(trainer.run_dir / "config.yaml", self._hparams)
        for summary in session_start(hparams, trainer.task.metric_names()) if hparams else ():
            self._file.summary(0, summary)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned and self._folder is not None:
                self._warned = True
                path = self._file.path if self._file is not None else self._folder
                _log.warning("%s; training continues without it", storage_error(path, error))


def command(folder: Path) -> str:
    """Return the command that serves a log directory to this machine only."""
    return f"tensorboard --logdir {shlex.quote(str(folder))} --host 127.0.0.1"
