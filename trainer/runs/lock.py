"""The lock that makes a run directory belong to one process, and ends with that process."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from trainer.files.forks import forget, keep_from_children
from trainer.files.storage import storage_error

LOCK_FILE = ".lock"
_PATIENCE = 2.0  # seconds a lock whose owner is dead or unknown is waited for
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds, or held, a run directory."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"

    @classmethod
    def this_process(cls) -> "Holder":
        """Describe the process that asks."""
        return cls(os.getpid(), socket.gethostname(), datetime.now().isoformat(" ", "seconds"))

    def is_dead(self) -> bool:
        """Say whether the process is known to be gone; one on another host never is."""
        return self.host == socket.gethostname() and not _alive(self.pid)


class RunLock:
    """An exclusive flock on a file of the run directory: the kernel drops it with the process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> Holder | None:
        """Take the lock; return None, or the holder that keeps it. Raises StorageError."""
        deadline = time.monotonic() + _PATIENCE
        while not self._try():
            holder = read_holder(self.path.parent)
            # A dead holder's worker processes may outlive it by a moment, and a new holder needs
            # one to write its name: both are worth a wait, a living holder is not.
            known_alive = holder is not None and not holder.is_dead()
            if known_alive or time.monotonic() > deadline:
                return holder or Holder(0, "an unknown host", "an unknown time")
            time.sleep(0.05)
        return None

    def release(self) -> None:
        """Give the lock up; harmless when it is not held."""
        if self._descriptor is not None:
            if forget(self._descriptor):
                os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise storage_error(self.path, error) from error
        if not _lock(descriptor, self.path):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        keep_from_children(descriptor)  # a worker of a killed run would hold the lock
        self._sign()
        return True

    def _sign(self) -> None:
        assert self._descriptor is not None
        content = json.dumps(asdict(Holder.this_process())).encode()
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)
        except OSError as error:
            self.release()
            raise storage_error(self.path, error) from error


def read_holder(folder: Path) -> Holder | None:
    """Return who signed the lock last, dead or alive; None when that cannot be read."""
    try:
        fields = json.loads((folder / LOCK_FILE).read_text())
        return Holder(int(fields["pid"]), str(fields["host"]), str(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(folder: Path) -> bool:
    """Say whether a living process holds the run in `folder`."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = read_holder(folder)
        return holder is None or not holder.is_dead()
    except OSError:  # a file system without locks: the recorded process decides
        holder = read_holder(folder)
        return holder is not None and not holder.is_dead()
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
            raise storage_error(path, error) from error
        _log.warning("cannot lock %s (%s): a second run here would not be noticed", path, error)
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
