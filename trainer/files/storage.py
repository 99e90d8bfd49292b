"""Errors of writing files, as one line with the reason."""

import errno
import os
from pathlib import Path

from trainer.errors import StorageError

_REASONS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "the name is too long",
}


def storage_error(path: Path, error: OSError, *, need: int | None = None) -> StorageError:
    """Return a StorageError with the reason why `path` could not be written."""
    return StorageError(f"cannot write {path}: {_reason(path, error, need)}")


def check_space(path: Path, need: int) -> None:
    """Raise StorageError if the folder of `path` has fewer than `need` bytes free."""
    free = free_bytes(path.parent)
    if free is not None and free < need:
        raise storage_error(path, OSError(errno.ENOSPC, "too little free space"), need=need)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`; None if they are unknown."""
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
    if error.errno == errno.ENOSPC and _has_no_inodes(path.parent):
        return f"{reason} for one more file: the file system has no inodes left (df -i)"
    if error.errno != errno.ENOSPC or need is None:
        return reason
    free = free_bytes(path.parent)
    return f"{reason} (need {megabytes(need)}, free {megabytes(free or 0)})"


def _has_no_inodes(folder: Path) -> bool:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return False
    return facts.f_files > 0 and facts.f_favail == 0
