"""Atomic replacement of files: a file is either complete or absent."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.files.forks import forget, keep_from_children
from trainer.files.storage import storage_error

TEMPORARY = ".tmp-"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def replacing(path: Path, *, need: int | None = None) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, durably, when the block ends without an exception.

    After an exception it is removed. `need` (bytes) is used in the message of a StorageError only.
    """
    temporary = _temporary(path)
    try:
        with _created(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        _discard(temporary)  # before the free space is measured, since it may fill the disk
        raise storage_error(path, error, need=need) from error
    except BaseException:
        _discard(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8)."""
    content = text.encode()
    with replacing(path, need=len(content)) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON. Raises ValueError for NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """Replace `target` atomically by a hard link to `source`, or by a copy if that fails.

    The folder is not synced: the caller's next durable write does that.
    """
    if _is_name_of(target, source):
        return  # rename() does nothing between two links to one file and would leave the temporary
    temporary = _temporary(target)
    try:
        os.link(source, temporary)
    except OSError:
        _copy(source, target)
        return
    try:
        os.replace(temporary, target)
    except OSError as error:
        _discard(temporary)
        raise storage_error(target, error) from error


def _is_name_of(target: Path, source: Path) -> bool:
    try:
        return not target.is_symlink() and target.samefile(source)
    except OSError:  # one of them does not exist
        return False


def remove_orphans(folder: Path) -> list[Path]:
    """Remove and return temporary files whose writer is dead; a living one holds a lock."""
    orphans = [path for path in folder.glob(f"{TEMPORARY}*") if _is_orphan(path)]
    for path in orphans:
        _discard(path)
    return orphans


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


def _temporary(path: Path) -> Path:
    # The suffix comes last: a search for *.pt must not find incomplete files.
    return path.with_name(f"{TEMPORARY}{path.name[:100]}-{os.getpid()}-{time.monotonic_ns():x}")


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    # With 0o666 the user's umask decides the mode; tempfile would set 0o600.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A worker forked meanwhile would hold the space of the file, whoever removes it.
        keep_from_children(descriptor)
        try:
            yield file
        finally:
            forget(descriptor)


def _copy(source: Path, target: Path) -> None:
    try:
        with open(source, "rb") as original, replacing(target, need=source.stat().st_size) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
    except OSError as error:
        raise storage_error(target, error) from error


def _is_orphan(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)  # a file or a folder
    except OSError as error:
        return error.errno != errno.ENOENT
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def _discard(path: Path) -> None:
    if not os.path.lexists(path):  # unlink on a read-only file system raises another error
        return
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror)
