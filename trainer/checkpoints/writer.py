"""Write one checkpoint file: with room for it, durably, and checked."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from trainer.checkpoints.hashing import HashingFile
from trainer.checkpoints.index import Index
from trainer.errors import ResourceError, StorageError
from trainer.files.atomic import replacing
from trainer.files.storage import check_space, storage_error

_MARGIN = 1.2  # of the last checkpoint's size must be free before the next is written


def write_checkpoint(path: Path, payload: dict[str, Any]) -> tuple[int, str]:
    """Write `payload` to `path` durably; return its size in bytes and its sha256.

    Raises StorageError, or ResourceError if memory runs out.
    """
    with replacing(path, need=_estimate(payload)) as file, HashingFile(file) as hashing:
        try:
            torch.save(payload, cast(BinaryIO, hashing))
        except (RuntimeError, MemoryError) as error:
            if hashing.error is not None:
                raise hashing.error from None
            if _lacks_memory(error):
                raise ResourceError(
                    f"cannot write {path}: no memory left; the earlier checkpoints are whole"
                ) from error
            raise
    return hashing.size, hashing.hexdigest()


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, by the chain of exceptions of torch's archive writer."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or "allocate memory" in text or "new thread" in text:
            return True
        error = error.__context__
    return False


def verify_written(path: Path, size: int) -> None:
    """Check size and directory of the archive. Raises StorageError.

    The bytes are not read back: a fresh read comes from the page cache, not from the disk.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            whole = path.stat().st_size == size and bool(archive.namelist())
    except OSError as error:
        raise storage_error(path, error) from error
    except zipfile.BadZipFile:
        whole = False
    if not whole:
        raise StorageError(f"cannot write {path}: what was written cannot be read back")


def check_room(path: Path, index: Index, payload: Mapping[str, Any]) -> None:
    """Raise StorageError if the disk has no room for another checkpoint like the last one."""
    last = max(index.files.values(), key=lambda entry: entry.step, default=None)
    need = max(int(_MARGIN * last.size) if last else 0, _estimate(payload))
    check_space(path, need)


def _estimate(payload: Any) -> int:
    """Return the size of all tensors' storages in bytes, counting shared ones once."""
    sizes: dict[int, int] = {}
    pending = [payload]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return sum(sizes.values())
