"""Files that are whole or absent, and logs of whole lines."""

import contextlib
import errno
import functools
import json
import logging
import math
import mmap
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from regimen.conf.interpolation import mapped
from regimen.trainer.errors import StorageError
from regimen.trainer.files.layout import VisibleFormatter, as_bytes

TEMPORARY = ".tmp-"
_log = logging.getLogger(__name__)
_closed_in_children: set[int] = set()  # descriptors that a forked process closes


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return a StorageError with the reason why `path` could not be written."""
    return StorageError(f"cannot write {path}: {os.strerror(error.errno or errno.EIO).lower()}")


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise a StorageError about `path` for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    # The suffix comes last: a search for *.pt must not find incomplete files.
    name = f"{TEMPORARY}{path.name[:100]}-{os.getpid()}-{time.monotonic_ns():x}"
    temporary = path.with_name(name)
    try:
        with storing(path):
            yield temporary
    finally:
        # Also after a rename: between two links to one file rename() does nothing.
        _remove(temporary)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, durably, when the block ends without an exception.

    After an exception it is removed. Raises StorageError.
    """
    with _temporary(path) as temporary:
        # With 0o666 the user's umask decides the mode; tempfile would set 0o600.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            close_in_children(descriptor)  # they would hold the space of a file that is removed
            try:
                yield file
                file.flush()
                os.fsync(descriptor)
                os.replace(temporary, path)
            finally:
                undo_close_in_children(descriptor)
        sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by any text (UTF-8)."""
    with replacing(path) as file:
        file.write(as_bytes(text))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, with null for NaN and infinity."""
    write_text(path, as_json(value, indent=2) + "\n")


def as_json(value: Any, **options: Any) -> str:
    """Return plain values as JSON, which has no NaN and no infinity: they become null.

    `options`: further arguments of `json.dumps`.
    """
    return json.dumps(mapped(value, _null_if_not_finite), allow_nan=False, **options)


def _null_if_not_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def link_or_copy(source: Path, target: Path) -> None:
    """Replace `target` atomically by a hard link to `source`, or by a copy if that fails.

    The folder is not synced: the caller's next durable write does that.
    """
    with _temporary(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            with open(source, "rb") as original, replacing(target) as copy:
                shutil.copyfileobj(original, copy, 1 << 20)
        else:
            os.replace(temporary, target)


def remove_orphans(folder: Path) -> None:
    """Remove the temporary files and folders of dead processes. Needs the run's lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        _remove(path)


def regular(path: Path) -> Path:
    """Return the path of a regular file: opening a pipe would wait for ever. Raises OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is a folder, pipe or device, not a file", str(path))
    return path


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable, if its file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def close_in_children(descriptor: int) -> None:
    """Have processes forked from here on close their copy of `descriptor`: they may live longer."""
    _register_at_fork()
    _closed_in_children.add(descriptor)


def undo_close_in_children(descriptor: int) -> bool:
    """Undo `close_in_children`; return False in a child, where `descriptor` is closed already."""
    is_open = descriptor in _closed_in_children
    _closed_in_children.discard(descriptor)
    return is_open


@functools.cache  # once, and only in a process that needs it
def _register_at_fork() -> None:
    def close() -> None:
        while _closed_in_children:
            os.close(_closed_in_children.pop())

    os.register_at_fork(after_in_child=close)


def _remove(path: Path) -> None:
    try:
        if os.path.lexists(path):  # unlink on a read-only file system raises another error
            shutil.rmtree(path) if path.is_dir() else os.unlink(path)
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror)


class AppendLog:
    """Append lines to a file; after an OSError it warns once and the run continues.

    Opening removes an incomplete last line, which a killed process leaves. It raises StorageError,
    since nothing is lost at that point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        with storing(path):
            # Not through a link: in a run that somebody else made it could lead anywhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o666)
            self._size = _whole_lines(self._descriptor)
            os.ftruncate(self._descriptor, self._size)

    def write(self, line: str) -> None:
        """Append `line`, with a newline if it has none."""
        content = as_bytes(line if line.endswith("\n") else line + "\n")
        rest = memoryview(content)
        try:
            while rest:
                written = os.write(self._descriptor, rest)
                rest = rest[written:]
            self._size += len(content)
        except OSError as error:
            # An incomplete line would be joined with the next one once there is space again.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self._warn(error)

    def offset(self) -> int:
        """Flush the file to disk and return its size in bytes."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._warn(error)
        return self._size

    def truncate(self, offset: int) -> None:
        """Truncate the file to `offset`; warn if it is shorter, since it has lost lines."""
        if offset > self._size:
            _log.warning("%s lost %d bytes of earlier lines", self.path, offset - self._size)
            return
        try:
            os.ftruncate(self._descriptor, offset)
            self._size = offset
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; training continues without it", storage_error(self.path, error))


class LogFileHandler(logging.StreamHandler[AppendLog]):
    """Append records to a file as complete lines. Raises StorageError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        # Opened first: logging closes at exit every handler that was constructed.
        super().__init__(AppendLog(path))
        self.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))

    def close(self) -> None:
        """Close the file."""
        self.stream.close()
        super().close()


def _whole_lines(descriptor: int) -> int:
    """Return the offset after the last newline."""
    if not os.fstat(descriptor).st_size:  # an empty file cannot be mapped
        return 0
    with mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
        return content.rfind(b"\n") + 1
