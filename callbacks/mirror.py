"""Keep a copy of the run at another place, so that it survives its machine."""

import logging
from pathlib import Path
from threading import Thread

from torch import nn

from regimen.callbacks.support import check_least
from regimen.trainer.callback import Callback, Results
from regimen.trainer.runs.remote import INDEX, Remote, check_address
from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Mirror(Callback):
    """Copy the run to an address after each durable save, and at its end.

    `to`: an address that fsspec opens, such as s3://BUCKET/FOLDER or file:///PATH; given on the
    command line only. `resume=` with the same address continues the run on another machine. A
    thread copies, one state at a time: a checkpoint that is saved meanwhile goes with the next
    copy. While the address does not answer there is one warning, and training goes on; at the start
    it is an error (exit 7). `patience`: seconds to wait for the last copy at the end of the run.
    """

    affects_result = False

    def __init__(self, to: str, patience: float = 600.0) -> None:
        check_least(0, patience=patience)
        self.to = to
        self.patience = patience
        self._remote: Remote | None = None
        self._copying: Thread | None = None
        self._copied_index = 0  # time of the index of checkpoints when the last copy began
        self._warned = False

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for an address that cannot be one."""
        check_address(self.to)

    def setup(self, trainer: Trainer) -> None:
        """Try the address. Raises StorageError."""
        if trainer.run_dir is not None and trainer.is_main:
            self._remote = Remote(self.to)
            self._remote.probe()

    def on_boundary(self, trainer: Trainer) -> None:
        """Begin a copy if a checkpoint was saved since the last copy, and no copy is under way."""
        run_dir = trainer.run_dir
        if self._remote is None or run_dir is None:
            return
        copying = self._copying
        if copying is not None and copying.is_alive():
            return
        try:
            index = (run_dir / INDEX).stat().st_mtime_ns
        except OSError:
            return  # nothing was saved yet
        if index != self._copied_index:
            self._copied_index = index
            # A daemon thread: a copy that hangs must not keep the process alive, and a copy may end
            # at any moment.
            self._copying = Thread(target=self._copy, args=(self._remote, run_dir), daemon=True)
            self._copying.start()

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Copy the run as it ended, after the copy that is under way."""
        if self._join_copy():
            self._copied_index = 0
            self.on_boundary(trainer)
            self._join_copy()

    def _join_copy(self) -> bool:
        """Wait for the copy under way; return whether it is complete."""
        copying = self._copying
        if copying is None:
            return True
        copying.join(self.patience)
        if copying.is_alive():
            _log.warning("callbacks.%s: the last copy is not complete", self.name)
            return False
        return True

    def _copy(self, remote: Remote, run_dir: Path) -> None:
        try:
            remote.send(run_dir)
            self._warned = False
        except Exception as error:  # each kind of storage has exceptions of its own
            if not self._warned:
                _log.warning("callbacks.%s: %s is not reached (%r)", self.name, self.to, error)
            self._warned = True
