"""Read files written by torch.save: detect damage, and refuse code."""

import _compat_pickle
import hashlib
import io
import os
import pickletools
import re
import stat
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer.errors import CheckpointError, ResourceError

_BLOCK = 1 << 20
_FOLDER = 0x10  # among the attributes of an archive's entry


class DamagedCheckpointError(CheckpointError):
    """A file that is not a checkpoint, or whose content changed after it was written."""


def read_archive(path: Path) -> Any:
    """Return what torch.save wrote to `path`, on the CPU, after checking its archive's CRCs.

    Raises DamagedCheckpointError, or CheckpointError if the file holds code or foreign types. It is
    never loaded in a way that could run code.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise DamagedCheckpointError(f"{path}: is a folder, pipe or device, not a file")
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
        raise DamagedCheckpointError(f"{path}: not a checkpoint: the file begins with zeros")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DamagedCheckpointError(f"{path}: not a checkpoint: the file is a web page")
    if start.startswith(b"PK"):
        _check_crcs(path, file)


def _check_crcs(path: Path, file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            script = any("/code/" in name for name in archive.namelist())
            # torch.save does not compress: a compressed entry means damage or a decompression bomb.
            # Of an entry marked as a folder its reader reads nothing: the memory stays as it was.
            odd = [
                info
                for info in archive.infolist()
                if info.compress_type
                or info.flag_bits & 1
                or (info.external_attr & _FOLDER and not info.is_dir())
            ]
            twice = _repeated(archive.namelist())
            _check_sizes(path, archive)
            broken = odd[0].filename if odd else archive.testzip()
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # zipfile raises about ten types for damaged archives
        raise DamagedCheckpointError(f"{path}: its archive is cut off or damaged") from error
    if script:
        raise CheckpointError(f"{path}: refused: contains code (a TorchScript program)")
    if twice is not None:
        raise DamagedCheckpointError(f"{path}: its archive holds {twice!r} twice")
    if broken is not None:
        raise DamagedCheckpointError(f"{path}: its archive is damaged in {broken!r} (CRC)")


def _repeated(names: list[str]) -> str | None:
    """Return a name that occurs twice: readers differ in which of the two they read.

    torch's reader ignores case.
    """
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            return name
        seen.add(name.casefold())
    return None


def _check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse entries that together are larger than the file: they overlap."""
    if sum(info.file_size for info in archive.infolist()) > path.stat().st_size:
        raise DamagedCheckpointError(f"{path}: its archive declares more bytes than it holds")


def _load(path: Path, file: BinaryIO) -> Any:
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            # Explicit, since an environment variable can change torch's default.
            return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise ResourceError(f"{path}: no memory left to load it") from error
    except Exception as error:
        if "allocate memory" in str(error):
            raise ResourceError(f"{path}: no memory left to load it") from error
        raise _refusal(path) from error


def _refusal(path: Path) -> CheckpointError:
    """Return the reason why torch refuses `path`, without its advice to load it unsafely."""
    names = _foreign_names(path)
    code = [name for name in names if is_code(name)]
    if code:
        return CheckpointError(f"{path}: refused: contains code ({code[0]})")
    if names:
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        return CheckpointError(
            f"{path}: refused: holds an object of type {names[0]}{more};"
            " only tensors, plain containers, numbers and strings are loaded"
        )
    return DamagedCheckpointError(f"{path}: not a checkpoint, or a damaged one")


def _os_reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return f"cannot be read: {error.strerror}"


# Modules of the standard library whose classes, and the types named here, are data.
_DATA_MODULES = {"argparse", "collections", "datetime", "decimal", "enum", "fractions", "pathlib"}
_DATA_MODULES |= {"typing", "uuid", "zoneinfo"}
_DATA_TYPES = {"array", "date", "datetime", "defaultdict", "deque", "time", "timedelta", "timezone"}
_DATA_BUILTINS = {"dict", "frozenset", "list", "object", "range", "slice", "tuple", "type"}
_NUMPY_DATA = {"_frombuffer", "_reconstruct", "bool", "bool_", "dtype", "ndarray", "scalar"}
_LARGEST = 1 << 28


def _foreign_names(path: Path) -> list[str]:
    """List what the pickles of `path` import beyond tensors and plain data; nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickletools warns about unusual escapes
        names = dict.fromkeys(map(_present, _imported(_pickled(path))))
        try:
            foreign = set(map(_present, get_unsafe_globals_in_checkpoint(path)))
        except Exception:  # not an archive, or another pickle protocol than torch.save's
            return [name for name in names if not _is_torchs(name)]
    return [name for name in names if name in foreign] or sorted(foreign)


def _present(name: str) -> str:
    """Return the Python 3 name for a Python 2 name, which pickle protocols up to 2 use."""
    module, _, attribute = name.rpartition(".")
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{attribute}"


def is_code(name: str) -> bool:
    """Return whether an imported name is a function, as opposed to a data type.

    By convention functions are lowercase and classes are capitalised. In the standard library,
    where a class may run a command, all but a few modules count as code.
    """
    module, _, attribute = name.rpartition(".")
    root = module.partition(".")[0]
    like_class = attribute.lstrip("_")[:1].isupper()
    if root == "builtins":
        return attribute not in _DATA_BUILTINS and not attribute.endswith(("Error", "Exception"))
    if root == "numpy":
        return not (attribute in _NUMPY_DATA or attribute[-1:].isdigit() or attribute[:2] == "__")
    if root in sys.stdlib_module_names or root in ("posix", "nt"):
        return root not in _DATA_MODULES or not (like_class or attribute in _DATA_TYPES)
    return not like_class


def _is_torchs(name: str) -> bool:
    """Return whether torch.save writes this name for a tensor, a storage or a dtype."""
    internal = name.startswith(("torch._utils._rebuild", "torch.storage."))
    return internal or re.fullmatch(r"torch\.\w+|collections\.OrderedDict", name) is not None


def _pickled(path: Path) -> bytes:
    """Return the pickles of an archive, or else the whole file. Never raises for its content."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [i for i in archive.infolist() if i.filename.endswith(".pkl")]
            return b"".join(archive.read(i) for i in inside if i.file_size < _LARGEST)
    except Exception:  # zipfile raises about ten types for damaged archives
        with open(path, "rb") as file:
            return file.read(_LARGEST)


def _imported(content: bytes) -> Iterator[str]:
    """Yield the names that a stream of pickles imports, up to the first unreadable byte."""
    stream = io.BytesIO(content)
    strings: list[str] = []
    with suppress(Exception):  # the rest is not a pickle; pickletools raises many types
        while stream.tell() < len(content):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL":
                    yield ".".join(strings[-2:])
                elif isinstance(argument, str):
                    strings.append(argument)
