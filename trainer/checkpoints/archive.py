"""Files of torch.save and of safetensors: written whole, and read without trusting them."""

import hashlib
import pickletools
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from regimen.conf.errors import lacks_memory
from regimen.data.batch import map_tensors
from regimen.trainer.errors import CheckpointError, ResourceError, StorageError
from regimen.trainer.files.atomic import regular, replacing

_IS_FOLDER = 0x10  # a flag in the attributes of an archive's entry
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class DamagedCheckpointError(CheckpointError):
    """A file that is not a checkpoint, or whose content changed after it was written."""


class NotPlainError(TypeError):
    """A value of a type that cannot be loaded without running code."""


def plain(value: Any) -> Any:
    """Return `value` with subclasses of numbers and strings (numpy scalars, enums) made plain.

    Tensors are returned as they are. Raises `NotPlainError` for any other type.
    """
    if isinstance(value, Tensor) or type(value) in _ATOMS:
        return value
    if type(value) in (dict, Counter, OrderedDict):
        return type(value)({plain(k): plain(v) for k, v in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(plain(v) for v in value)
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return plain(value.item())
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that are plain; others, such as functions, are left out."""
    entries = {}
    for key, value in values.items():
        with suppress(NotPlainError):
            entries[key] = plain(value)
    return entries


def on_host(tree: Any, copy: Callable[[Tensor], Tensor] = Tensor.cpu) -> Any:
    """Return `tree` with its tensors on the CPU; what was one tensor (tied weights) stays one.

    Sharded tensors (DTensor) and those on the meta device stay as they are. Waits for the device,
    unless `copy` does not.
    """
    copies = {}

    def to_host(tensor: Tensor) -> Tensor:
        if tensor.is_meta or hasattr(tensor, "device_mesh"):
            return tensor
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            return tensor.cpu().clone()
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        if view not in copies:
            copies[view] = copy(tensor)
        return copies[view]

    return map_tensors(to_host, tree)


def write_archive(path: Path, payload: Any) -> None:
    """Write `payload` durably. Raises StorageError, or ResourceError if memory runs out."""
    with replacing(path) as file:
        try:
            torch.save(payload, file)
        except (RuntimeError, MemoryError) as error:
            # torch's archive writer raises its own errors: the cause is in their context.
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise cause from None
                if lacks_memory(cause):
                    raise ResourceError(
                        f"cannot write {path}: no memory left; the earlier checkpoints are whole"
                    ) from error
                cause = cause.__context__
            raise


def read_archive(path: Path, crcs: bool = True) -> Any:
    """Return what torch.save wrote to `path`, on the CPU; by default its CRCs are checked.

    It is never loaded in a way that could run code. Raises DamagedCheckpointError, or
    CheckpointError if the file holds anything but tensors and plain values.
    """
    try:
        # torch warns of old formats, which are read all the same.
        with open(regular(path), "rb") as file, warnings.catch_warnings(action="ignore"):
            if file.read(2) == b"PK":
                _check(path, file, crcs)
            file.seek(0)
            # Explicit, since an environment variable can change torch's default.
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:
        if lacks_memory(error):
            raise ResourceError(f"{path}: no memory left to load it") from error
        raise _refusal(path, error) from error


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, file: BinaryIO, crcs: bool) -> None:
    """Refuse an archive that torch.save does not write, or that changed afterwards."""
    names = set()
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # Readers differ in which of two entries of a name they take; torch's ignores case.
            names = {entry.filename.casefold() for entry in entries}
            is_ambiguous = len(names) < len(entries)
            # torch's reader skips entries flagged as folders and leaves the tensor uninitialized.
            # Compressed entries can expand without bound, and so can entries that overlap.
            is_odd = any(e.compress_type or e.external_attr & _IS_FOLDER for e in entries)
            expands = sum(e.file_size for e in entries) > path.stat().st_size
            damaged = is_odd or expands or is_ambiguous or bool(crcs and archive.testzip())
    except MemoryError:
        raise
    except Exception:  # zipfile raises about ten types for damaged archives
        damaged = True
    if any("/code/" in name for name in names):
        raise CheckpointError(f"{path}: refused: contains code (a TorchScript program)")
    if damaged:
        raise DamagedCheckpointError(f"{path}: its archive is damaged, or none of torch.save's")


def _refusal(path: Path, error: Exception) -> CheckpointError:
    """Return the reason why torch refuses `path`, without its advice to load it unsafely."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    name = match[1] if match else _first_import(path)
    if name is None:
        return DamagedCheckpointError(f"{path}: not a checkpoint, or a damaged one")
    return CheckpointError(
        f"{path}: refused: contains code ({name}); only tensors, plain containers, numbers and "
        "strings are loaded"
    )


def _first_import(path: Path) -> str | None:
    """Return the first name that a pickle of a protocol above 2 imports; None without any.

    torch does not read these protocols, and does not name what they import.
    """
    strings = [""]
    with open(path, "rb") as file, suppress(Exception):  # the bytes may be no pickle
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STACK_GLOBAL":
                return ".".join(strings[-2:])
            if isinstance(argument, str):
                strings.append(argument)
    return None


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
    """Replace `path` by a file of these tensors, and text metadata. Raises StorageError.

    Tied weights are written once for each name: the format has no shared tensors.
    """
    values = {}
    storages = set()
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
