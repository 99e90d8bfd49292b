"""The lock of a run directory, which one process holds until it ends."""

import fcntl
import json
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from regimen.conf.errors import one_line, shortened
from regimen.conf.json_text import plain_json
from regimen.trainer.errors import StorageError
from regimen.trainer.files.atomic import (
    close_in_children,
    regular,
    storage_error,
    undo_close_in_children,
)

LOCK_FILE = ".lock"
_PATIENCE = 2.0  # seconds to wait for a lock whose holder is dead or unknown
_log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """The process that holds, or held, a run directory."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False for one on another host."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        return False


class RunLock:
    """An exclusive flock on a file of the run directory, released when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> Holder | None:
        """Acquire the lock and return None, or return its holder. Raises StorageError."""
        deadline = time.monotonic() + _PATIENCE
        while not self._try():
            holder = read_holder(self.path.parent)
            # Wait for the worker processes of a dead holder, which may outlive it for a moment, and
            # for a new holder to write its name. A living holder is reported at once.
            known_alive = holder is not None and not holder.is_dead()
            if known_alive or time.monotonic() > deadline:
                return holder or Holder(0, "an unknown host", "an unknown time")
            time.sleep(0.05)
        return None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            if undo_close_in_children(self._descriptor):
                os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> bool:
        now = datetime.now().isoformat(" ", "seconds")
        content = json.dumps(Holder(os.getpid(), socket.gethostname(), now)._asdict()).encode()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError as error:  # a file system without locks
                _log.warning(
                    "cannot lock %s (%s): a second run here would not be detected", self.path, error
                )
            self._descriptor = descriptor
            close_in_children(descriptor)  # a worker of a killed run would hold the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        except OSError as error:
            self.release()
            raise storage_error(self.path, error) from error
        return True


def read_holder(folder: Path) -> Holder | None:
    """Return the last holder written to the lock, dead or alive; None if it cannot be read."""
    try:
        fields = plain_json(regular(folder / LOCK_FILE).read_bytes(), finite=True)
        host = shortened(one_line(fields["host"]))
        since = shortened(one_line(fields["since"]))
        return Holder(int(fields["pid"]), host, since)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_taken(folder: Path) -> None:
    """Raise StorageError if another process holds the run in `folder`.

    A folder that is moved or removed takes the lock of its run along: another run can begin
    under the same name, and the first must not write there.
    """
    holder = read_holder(folder)
    if holder is None or (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
        return
    if is_held(folder):
        raise StorageError(
            f"cannot write into {folder}: this run's folder was moved or removed, and another run "
            f"is there now ({holder})"
        )


def is_held(folder: Path) -> bool:
    """Return whether a living process holds the run in `folder`."""
    try:
        descriptor = os.open(regular(folder / LOCK_FILE), os.O_RDONLY)
    except OSError:
        return False
    holder = read_holder(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder is None or not holder.is_dead()
    except OSError:  # a file system without locks: the recorded process decides
        return holder is not None and not holder.is_dead()
    finally:
        os.close(descriptor)
    return False
