"""Atomic replacement of files: a file is either complete or absent."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import StorageError

TEMPORARY = ".tmp-"
_log = logging.getLogger(__name__)
_kept: set[int] = set()  # descriptors that a forked process closes
_REASONS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "it is a symbolic link",
    errno.ENAMETOOLONG: "the name is too long",
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return a StorageError with the reason why `path` could not be written."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not path.parent.is_dir():
        reason = f"the folder {path.parent} does not exist"
    else:
        code = error.errno or errno.EIO
        reason = _REASONS.get(code) or os.strerror(code).lower()
    return StorageError(f"cannot write {path}: {reason}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, durably, when the block ends without an exception.

    After an exception it is removed. Raises StorageError.
    """
    temporary = _temporary(path)
    try:
        # With 0o666 the user's umask decides the mode; tempfile would set 0o600.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            keep_from_children(descriptor)  # they would hold the space of a file that is removed
            try:
                yield file
                file.flush()
                os.fsync(descriptor)
                os.replace(temporary, path)
            finally:
                forget(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        _discard(temporary)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8)."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON. Raises ValueError for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """Replace `target` atomically by a hard link to `source`, or by a copy if that fails.

    The folder is not synced: the caller's next durable write does that.
    """
    temporary = _temporary(target)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            with open(source, "rb") as original, replacing(target) as copy:
                shutil.copyfileobj(original, copy, 1 << 20)
        else:
            os.replace(temporary, target)
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        _discard(temporary)  # rename() does nothing between two links to one file


def remove_orphans(folder: Path) -> None:
    """Remove temporary files and folders whose writer is dead; a living one holds a lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # a file system without locks
                pass
            finally:
                os.close(descriptor)
        _discard(path)


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


def keep_from_children(descriptor: int) -> None:
    """Have processes forked from here on close their copy of `descriptor`: they may live longer."""
    _register()
    _kept.add(descriptor)


def forget(descriptor: int) -> bool:
    """Leave `descriptor` to its owner again, who may close it unless a fork has: false."""
    found = descriptor in _kept
    _kept.discard(descriptor)
    return found


@functools.cache  # once, and only by a process that keeps something
def _register() -> None:
    def close() -> None:
        while _kept:
            os.close(_kept.pop())

    os.register_at_fork(after_in_child=close)


def _temporary(path: Path) -> Path:
    # The suffix comes last: a search for *.pt must not find incomplete files.
    return path.with_name(f"{TEMPORARY}{path.name[:100]}-{os.getpid()}-{time.monotonic_ns():x}")


def _discard(path: Path) -> None:
    try:
        if os.path.lexists(path):  # unlink on a read-only file system raises another error
            shutil.rmtree(path) if path.is_dir() else os.unlink(path)
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror)
