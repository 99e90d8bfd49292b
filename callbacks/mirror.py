"""Keep a copy of the run at another place, so that it survives its machine."""

import logging
from pathlib import Path
from threading import Thread

from torch import nn

from regimen.trainer.callback import Callback, Results
from regimen.trainer.runs.remote import INDEX, Remote, check_address
from regimen.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Mirror(Callback):
    """Copy the run to an address after each durable save, and at its end.

    `to`: what fsspec opens, such as s3://BUCKET/FOLDER or file:///PATH; nothing but the command
    line says it. `resume=` with the same address goes on on another machine. A thread copies, one
    state at a time: what is saved meanwhile goes with the next copy. While the address does not
    answer there is one warning, and training goes on; at the start it is an error (exit 7).
    `patience`: seconds to wait for the last copy at the end of the run.
    """

    def __init__(self, to: str, patience: float = 600.0) -> None:
        self.to, self.patience = to, patience
        self._remote: Remote | None = None
        self._copying: Thread | None = None
        self._copied = 0  # the index that was last seen, by its time
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
        """Begin a copy where a checkpoint was saved since the last, and none is on its way."""
        run_dir, under_way = trainer.run_dir, self._copying is not None and self._copying.is_alive()
        if self._remote is None or run_dir is None or under_way:
            return
        try:
            saved = (run_dir / INDEX).stat().st_mtime_ns
        except OSError:
            return  # nothing was saved yet
        if saved != self._copied:
            self._copied = saved
            # One that hangs must not keep the process; a copy may end at any moment.
            self._copying = Thread(target=self._copy, args=(self._remote, run_dir), daemon=True)
            self._copying.start()

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Copy the run as it ended, after the copy that is on its way."""
        if self._waited():
            self._copied = 0
            self.on_boundary(trainer)
            self._waited()

    def _waited(self) -> bool:
        """Wait for the copy on its way; return whether it is complete."""
        if self._copying is not None:
            self._copying.join(self.patience)
            if self._copying.is_alive():
                _log.warning("callbacks.%s: the last copy is not complete", self.name)
                return False
        return True

    def _copy(self, remote: Remote, run_dir: Path) -> None:
        try:
            remote.send(run_dir)
            self._warned = False
        except Exception as error:  # each kind of storage has its own
            if not self._warned:
                _log.warning("callbacks.%s: %s is not reached (%r)", self.name, self.to, error)
            self._warned = True
