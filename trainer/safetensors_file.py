"""Weights alone, in the .safetensors format that other programs read; the package is optional."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.archive import DamagedCheckpointError
from trainer.atomic import replacing
from trainer.errors import CheckpointError


def is_available() -> bool:
    """Say whether the package is installed, without importing it."""
    return importlib.util.find_spec("safetensors") is not None


def write_safetensors(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace `path` by the tensors among `weights`. Raises StorageError.

    Tied weights are stored once for each name: the format knows no sharing.
    """
    _demand(path)
    from safetensors.torch import save  # type: ignore[import-not-found, unused-ignore]

    tensors = {name: t for name, t in weights.items() if isinstance(t, torch.Tensor)}
    content = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    with replacing(path, need=len(content)) as file:
        file.write(content)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of `path`, on the CPU. Raises CheckpointError."""
    _demand(path)
    from safetensors.torch import load  # type: ignore[import-not-found, unused-ignore]

    try:
        return dict(load(path.read_bytes()))
    except Exception as error:
        raise DamagedCheckpointError(f"{path}: a damaged file, or no safetensors") from error


def _demand(path: Path) -> None:
    if not is_available():
        raise CheckpointError(f"{path}: this needs the package safetensors, which is not installed")
