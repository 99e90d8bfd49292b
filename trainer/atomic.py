"""Files that are whole or absent: replaced in one step, durable before anything relies on them."""

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

from trainer.errors import StorageError

TEMPORARY = ".tmp-"
_log = logging.getLogger(__name__)

_REASONS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "the name is too long",
}


@contextlib.contextmanager
def replacing(path: Path, *, need: int | None = None) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path`, durable, once the block ends well.

    Otherwise nothing of it stays. `need` (bytes) only serves the message of a StorageError.
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
        # Measured before the remains are removed: they are what filled the disk.
        failure = storage_error(path, error, need=need)
        _discard(temporary)
        raise failure from error
    except BaseException:
        _discard(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8)."""
    content = text.encode()
    with replacing(path, need=len(content)) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON; numbers that are not finite are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a further name of `source` in one step: a hard link, a copy where there are none.

    The folder is not synced: the caller's next durable write does it.
    """
    if target.exists() and not target.is_symlink() and target.samefile(source):
        return  # rename() does nothing between two names of one file, and would leave the temporary
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


def remove_orphans(folder: Path) -> list[Path]:
    """Remove temporary files whose writer is dead; return them. A living writer holds a lock on its own."""
    orphans = [path for path in folder.glob(f"{TEMPORARY}*") if _is_orphan(path)]
    for path in orphans:
        _discard(path)
    return orphans


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError, *, need: int | None = None) -> StorageError:
    """Say in one line what kept `path` from being written."""
    return StorageError(f"cannot write {path}: {_reason(path, error, need)}")


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that may still be written in `folder`; None where that is not known."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def megabytes(count: int) -> str:
    """Format a number of bytes, as in `5.1 MB`."""
    return f"{count / 1e6:.1f} MB"


def _reason(path: Path, error: OSError, need: int | None) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    reason = _REASONS.get(error.errno or 0) or os.strerror(error.errno or errno.EIO).lower()
    if error.errno != errno.ENOSPC or need is None:
        return reason
    free = free_bytes(path.parent)
    return f"{reason} (need {megabytes(need)}, free {megabytes(free or 0)})"


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{time.monotonic_ns():x}-{path.name[:100]}")


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    # 0o666 leaves the mode to the user's umask; tempfile would make it 0o600.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def _copy(source: Path, target: Path) -> None:
    try:
        with open(source, "rb") as original, replacing(target, need=source.stat().st_size) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
    except OSError as error:
        raise storage_error(target, error) from error


def _is_orphan(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def _discard(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror)
