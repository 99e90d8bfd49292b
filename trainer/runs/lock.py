"""The lock of a run directory, which one process holds until it ends."""

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

from trainer.errors import StorageError
from trainer.files.forks import forget, keep_from_children
from trainer.files.storage import storage_error

LOCK_FILE = ".lock"
_PATIENCE = 2.0  # seconds to wait for a lock whose holder is dead or unknown
_held: set[Path] = set()  # lock files that this process has signed
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
        """Describe the current process."""
        return cls(os.getpid(), socket.gethostname(), datetime.now().isoformat(" ", "seconds"))

    def is_dead(self) -> bool:
        """Return whether the process is known to have ended; False for one on another host."""
        return self.host == socket.gethostname() and not _alive(self.pid)


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
            # for a new holder to write its name, but not for a living holder.
            known_alive = holder is not None and not holder.is_dead()
            if known_alive or time.monotonic() > deadline:
                return holder or Holder(0, "an unknown host", "an unknown time")
            time.sleep(0.05)
        return None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            _held.discard(self.path)
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
        _held.add(self.path)
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
    """Return the last holder written to the lock, dead or alive; None if it cannot be read."""
    try:
        fields = json.loads((folder / LOCK_FILE).read_text())
        return Holder(int(fields["pid"]), str(fields["host"]), str(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_taken(folder: Path) -> None:
    """Raise StorageError if another process holds, or has taken from this one, the run in `folder`.

    A folder that is moved or removed takes the lock of its run along: another run can begin
    under the same name, and the first must not write there.
    """
    holder = read_holder(folder)
    if holder is None or (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
        return
    if folder / LOCK_FILE in _held or is_held(folder):
        raise StorageError(
            f"cannot write into {folder}: this run's folder was moved or removed, and another run "
            f"is there now ({holder})"
        )


def is_held(folder: Path) -> bool:
    """Return whether a living process holds the run in `folder`."""
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
        _log.warning(
            "cannot lock %s (%s): a second run in this directory would not be detected", path, error
        )
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
