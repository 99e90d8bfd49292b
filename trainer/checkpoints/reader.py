"""Read checkpoints, verified against archive CRCs, format version and index."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints import shards as checkpoint_shards
from trainer.checkpoints.archive import DamagedCheckpointError, digest, read_archive
from trainer.checkpoints.index import INDEX, Index
from trainer.checkpoints.weights import read_safetensors
from trainer.errors import CheckpointError

FORMAT_VERSION = 1
_ATTEMPTS = 5
_WEIGHTS = ("model", "ema", "callbacks", "shards", "format_version")  # of a run's checkpoint
_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path` on the CPU; sharded tensors are on the meta device.

    It is read again if a running process replaced it meanwhile. Raises CheckpointError.
    """
    for _ in range(_ATTEMPTS - 1):
        before = _identity(path)
        try:
            return _read(path)
        except DamagedCheckpointError:
            if _identity(path) == before:
                raise
    return _read(path)


def read_whole(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path` on the CPU, including the values of its shards."""
    return checkpoint_shards.read(read_checkpoint(path))


def _read(path: Path) -> dict[str, Any]:
    """Read and check a file; content is checked before the digest, for the better error."""
    payload = read_archive(path)
    if not isinstance(payload, dict) or "format_version" not in payload:
        raise CheckpointError(f"{path}: not a checkpoint of a run: it has no format_version")
    _check_format(path, payload["format_version"])
    _check_digest(path)
    checkpoint_shards.check(payload, path)
    return payload


def _identity(path: Path) -> list[tuple[int, int] | None]:
    """Return values that change when the file or its index is replaced."""
    found: list[tuple[int, int] | None] = []
    for file in (path, path.parent / INDEX):
        try:
            facts = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_ino, facts.st_mtime_ns))
    return found


def model_only(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in `path` by name: a checkpoint, a state dict or a .safetensors file.

    A run directory means its best checkpoint, or else its last.
    """
    if path.is_dir():
        path = _weights_in(path)
    return _weights(path, read_weights(path))


def read_weights(path: Path) -> Any:
    """Return the content of a file on the CPU; of a checkpoint, only weights and averages.

    Raises CheckpointError.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    payload = read_archive(path)
    if isinstance(payload, dict) and "format_version" in payload:
        payload = read_checkpoint(path)
        payload = checkpoint_shards.read({k: payload[k] for k in _WEIGHTS if k in payload})
    return payload


def compare_names(
    payload: Mapping[str, Any], model_state: Mapping[str, Any], path: Path | None = None
) -> None:
    """Compare names, shapes and dtypes of a checkpoint's weights with the model's.

    Raises CheckpointError with the first difference in the model's order, and a count of the rest.
    """
    saved = payload["model"]
    differences = [
        f"{name} is {_shape(saved, name)} in it, {_shape(model_state, name)} in the model"
        for name in dict.fromkeys([*model_state, *saved])
        if _shape(saved, name) != _shape(model_state, name)
    ] or [
        f"{name} is {saved[name].dtype} in it, {value.dtype} in the model (trainer.precision)"
        for name, value in model_state.items()
        if isinstance(value, torch.Tensor) and saved[name].dtype != value.dtype
    ]
    if differences:
        more = f" (+{len(differences) - 1} more)" if len(differences) > 1 else ""
        where = f"{path}: " if path else ""
        raise CheckpointError(f"{where}does not fit the model: {differences[0]}{more}")


def _shape(state: Mapping[str, Any], name: str) -> str:
    if name not in state:
        return "missing"
    value = state[name]
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _check_format(path: Path, version: Any) -> None:
    if type(version) is not int:
        raise CheckpointError(f"{path}: format {version!r} is not a number")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {version} > supported {FORMAT_VERSION}: a newer Regimen wrote it"
        )
    if version < FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version} < supported {FORMAT_VERSION}")


def _check_digest(path: Path) -> None:
    """Compare the file's digest with the index of its folder, if it is listed there."""
    index = Index.read(path.parent)
    entry = index.files.get(path.name)
    if entry is not None:
        known = {entry.sha256}
    elif path.stem in index.names:
        # The index is written last: a name may already refer to a checkpoint that the index does
        # not list yet.
        unlisted = [
            other for other in path.parent.glob("step-*.pt") if other.name not in index.files
        ]
        known = {entry.sha256 for entry in (*index.files.values(), *index.names.values())}
        known |= {digest(other) for other in unlisted}
    else:
        return
    if digest(path) not in known:
        raise DamagedCheckpointError(f"{path}: the file changed after it was saved (sha256)")


def _weights_in(folder: Path) -> Path:
    for parent in (folder / "checkpoints", folder):
        for name in ("best.pt", "last.pt"):
            if (parent / name).is_file():
                return parent / name
    raise CheckpointError(f"{folder}: it contains neither best.pt nor last.pt")


def _weights(path: Path, payload: Any) -> dict[str, torch.Tensor]:
    if isinstance(payload, Mapping):
        inner = next((payload[key] for key in _WEIGHT_KEYS if key in payload), payload)
        if isinstance(inner, Mapping) and inner:
            weights = {str(name): value for name, value in inner.items()}
            if all(isinstance(value, torch.Tensor) for value in weights.values()):
                return weights
    raise CheckpointError(f"{path}: contains no weights: expected a dict of tensors")
