"""Files of torch.save and of safetensors: written whole, and read without trusting them."""

import _compat_pickle
import hashlib
import io
import pickletools
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer.errors import CheckpointError, ResourceError, StorageError
from trainer.files.atomic import regular, replacing

_FOLDER = 0x10  # among the attributes of an archive's entry
_LARGEST = 1 << 28  # bytes of a pickle that is searched for code
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAPPINGS: tuple[type, ...] = (dict, Counter, OrderedDict)
_SEQUENCES: tuple[type, ...] = (list, tuple, set)


class DamagedCheckpointError(CheckpointError):
    """A file that is not a checkpoint, or whose content changed after it was written."""


class NotPlainError(TypeError):
    """A value of a type that cannot be loaded without running code."""


def plain(value: Any) -> Any:
    """Return `value` with subclasses of numbers and strings (numpy scalars, enums) made plain.

    Tensors are returned as they are. Raises `NotPlainError` for any other type.
    """
    if isinstance(value, torch.Tensor) or type(value) in _ATOMS:
        return value
    if type(value) in _MAPPINGS:
        return type(value)({plain(k): plain(v) for k, v in value.items()})
    if type(value) in _SEQUENCES:
        return type(value)(plain(v) for v in value)
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return plain(value.item())
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that are plain; others, such as functions, are left out."""
    kept = {}
    for key, value in values.items():
        try:
            kept[key] = plain(value)
        except NotPlainError:
            continue
    return kept


def write_archive(path: Path, payload: Any) -> None:
    """Write `payload` durably. Raises StorageError, or ResourceError if memory runs out."""
    with replacing(path) as file:
        try:
            torch.save(payload, file)
        except (RuntimeError, MemoryError) as error:  # what torch's archive writer makes of others
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise cause from None
                if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                    message = "no memory left; the earlier checkpoints are whole"
                    raise ResourceError(f"cannot write {path}: {message}") from error
                cause = cause.__context__
            raise


def read_archive(path: Path, crcs: bool = True) -> Any:
    """Return what torch.save wrote to `path`, on the CPU; by default its CRCs are checked.

    It is never loaded in a way that could run code. Raises DamagedCheckpointError, or
    CheckpointError if the file holds anything but tensors and plain values.
    """
    try:
        with open(regular(path), "rb") as file:
            if file.read(2) == b"PK":
                _check(path, file, crcs)
            file.seek(0)
            return _load(path, file)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path}: there is no such file") from error
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, file: BinaryIO, crcs: bool) -> None:
    """Refuse an archive that torch.save does not write, or that changed afterwards."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # Of an entry marked as a folder torch's reader reads nothing: the memory stays as it
            # was. Compressed entries, or such as overlap, can expand without bound.
            odd = [e.filename for e in entries if e.compress_type or e.external_attr & _FOLDER]
            broken = odd[0] if odd else archive.testzip() if crcs else None
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises about ten types for damaged archives
        raise DamagedCheckpointError(f"{path}: its archive is cut off or damaged") from error
    if any("/code/" in entry.filename for entry in entries):
        raise CheckpointError(f"{path}: refused: contains code (a TorchScript program)")
    # Readers differ in which of two entries of a name they take; torch's ignores case.
    name, count = Counter(e.filename.casefold() for e in entries).most_common(1)[0]
    if count > 1:
        raise DamagedCheckpointError(f"{path}: its archive holds {name!r} twice")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise DamagedCheckpointError(f"{path}: its archive declares more bytes than it holds")
    if broken is not None:
        raise DamagedCheckpointError(f"{path}: its archive is damaged in {broken!r} (CRC)")


def _load(path: Path, file: BinaryIO) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            # Explicit, since an environment variable can change torch's default.
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise ResourceError(f"{path}: no memory left to load it") from error
        raise _refusal(path) from error


def _refusal(path: Path) -> CheckpointError:
    """Return the reason why torch refuses `path`, without its advice to load it unsafely."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickletools warns about unusual escapes
        try:
            names = sorted(map(_present, get_unsafe_globals_in_checkpoint(path)))
        except Exception:  # no archive, or a pickle of another protocol than torch.save's
            names = [n for n in map(_present, _imported(path)) if not n.startswith("torch.")]
    if names:
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        return CheckpointError(
            f"{path}: refused: contains code ({names[0]}){more}; "
            "only tensors, plain containers, numbers and strings are loaded"
        )
    with open(path, "rb") as file:
        start = file.read(512).strip(b"\0\n ")
    if not start:
        return DamagedCheckpointError(f"{path}: the file is empty")
    page = " but a web page" if start.startswith(b"<") else ", or a damaged one"
    return DamagedCheckpointError(f"{path}: not a checkpoint{page}")


def _present(name: str) -> str:
    """Return the Python 3 name for a Python 2 name, which pickle protocols up to 2 use."""
    module, _, attribute = name.rpartition(".")
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{attribute}"


def _imported(path: Path) -> Iterator[str]:
    """Yield the names that the pickles of a file import, up to the first unreadable byte."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [e for e in archive.infolist() if e.filename.endswith(".pkl")]
            content = b"".join(archive.read(e) for e in inside if e.file_size < _LARGEST)
    except Exception:  # no archive, or a damaged one
        with open(path, "rb") as file:
            content = file.read(_LARGEST)
    stream, strings = io.BytesIO(content), [""]
    with suppress(Exception):  # the rest is not a pickle; pickletools raises many types
        while stream.tell() < len(content):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL":
                    yield ".".join(strings[-2:])
                elif isinstance(argument, str):
                    strings.append(argument)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of `path` by name, on the CPU. Raises CheckpointError."""
    try:
        # Not load_file, which maps the file: overwriting it would change the tensors.
        return safetensors.torch.load(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path}: damaged, or not a .safetensors file") from error


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Replace `path` by a file of these tensors, and of text about them. Raises StorageError.

    Tied weights are written once for each name: the format has no shared tensors.
    """
    values: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        values[name] = value.clone() if storage in storages else value
        storages.add(storage)
    try:
        content = safetensors.torch.save(values, {**(metadata or {}), "format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"cannot write {path}: the format does not support {error}") from error
    with replacing(path) as file:
        file.write(content)
