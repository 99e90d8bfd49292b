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
