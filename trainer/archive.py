"""Read a file of torch.save so that no damage and no code in it passes unseen."""

import hashlib
import os
import stat
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.errors import CheckpointError, ResourceError
from trainer.pickled_names import foreign_names, is_code

_BLOCK = 1 << 20


class DamagedCheckpointError(CheckpointError):
    """A file that is not, or no longer, what was written."""


def read_archive(path: Path) -> Any:
    """Return what torch.save wrote to `path`, on the CPU, after checking its archive's CRCs.

    Raises DamagedCheckpointError, or CheckpointError where it holds code or foreign types. Never
    falls back to a load that could run code.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, without end
            raise DamagedCheckpointError(f"{path}: is no file, but a folder, pipe or device")
        with open(path, "rb") as file:
            _check(path, file)
            return _load(path, file)
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {_os_reason(error)}") from error


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, file: BinaryIO) -> None:
    start = file.read(512)
    if not start:
        raise DamagedCheckpointError(f"{path}: the file is empty")
    if not start.strip(b"\0"):
        raise DamagedCheckpointError(f"{path}: the file begins with zeros, it is no checkpoint")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DamagedCheckpointError(f"{path}: the file is a web page, not a checkpoint")
    if start.startswith(b"PK"):
        _check_crcs(path, file)


def _check_crcs(path: Path, file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            script = any("/code/" in name for name in archive.namelist())
            # torch.save compresses nothing; what claims to be compressed is damaged, or a bomb.
            odd = [info for info in archive.infolist() if info.compress_type or info.flag_bits & 1]
            twice = _repeated(archive.namelist())
            _check_sizes(path, archive)
            broken = odd[0].filename if odd else archive.testzip()
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # zipfile raises some ten types for what a flipped bit can do
        raise DamagedCheckpointError(f"{path}: its archive is cut off or damaged") from error
    if script:
        raise CheckpointError(f"{path}: refused: contains code (a TorchScript program)")
    if twice is not None:
        raise DamagedCheckpointError(f"{path}: its archive holds {twice!r} twice")
    if broken is not None:
        raise DamagedCheckpointError(f"{path}: its archive is damaged in {broken!r} (CRC)")


def _repeated(names: list[str]) -> str | None:
    """Return a name that stands twice: readers differ in which one they take.

    torch's reader looks names up without regard to case.
    """
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            return name
        seen.add(name.casefold())
    return None


def _check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse entries that together are larger than the file: they overlap, and multiply work."""
    if sum(info.file_size for info in archive.infolist()) > path.stat().st_size:
        raise DamagedCheckpointError(f"{path}: its archive claims more than it holds")


def _load(path: Path, file: BinaryIO) -> Any:
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on formats: the answer is ours
            # Explicit: an environment variable can flip torch's default, and code would run.
            return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise ResourceError(f"{path}: no memory left to load it") from error
    except Exception as error:
        if "allocate memory" in str(error):
            raise ResourceError(f"{path}: no memory left to load it") from error
        raise _refusal(path) from error


def _refusal(path: Path) -> CheckpointError:
    """Say why torch would not load `path`, without its advice to load it unsafely."""
    names = foreign_names(path)
    code = [name for name in names if is_code(name)]
    if code:
        return CheckpointError(f"{path}: refused: contains code ({code[0]})")
    if names:
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        return CheckpointError(
            f"{path}: refused: holds an object of type {names[0]}{more};"
            " only tensors, plain containers, numbers and strings are loaded"
        )
    return DamagedCheckpointError(f"{path}: the file is no checkpoint, or a damaged one")


def _os_reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return f"cannot be read: {error.strerror}"
