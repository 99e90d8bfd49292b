"""Read and write .safetensors files, which hold names and tensors but no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.errors import StorageError
from trainer.files.atomic import replacing


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
