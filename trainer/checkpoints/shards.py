"""Sharded checkpoints by torch.distributed.checkpoint: each process writes its part.

`step-00000120.pt` is then an outline: a checkpoint whose sharded tensors are on the meta device.
Its key `shards` names the folder with their values, and the digests of the files in it.
"""

from __future__ import annotations

import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoints.archive import DamagedCheckpointError, digest, is_code
from trainer.checkpoints.index import Index
from trainer.distributed.processes import ProcessGroup
from trainer.errors import CheckpointError, StorageError
from trainer.files.atomic import TEMPORARY, sync_folder
from trainer.files.storage import check_space, storage_error

SUFFIX = ".shards"
_METADATA = "torch.distributed.checkpoint.metadata"
# The types in the .metadata of the shards; any other would be unpickled unchecked.
_PLAIN = {
    *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_METADATA}.{name}" for name in ("TensorStorageMetadata", "TensorProperties")),
    *(f"{_METADATA}.{name}" for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
}


def write(payload: Mapping[str, Any], target: Path, group: ProcessGroup) -> dict[str, Any]:
    """Write the sharded tensors of `payload` beside `target`; return the outline for `target`.

    A collective. The shards are durable on return. Raises StorageError on all processes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors: dict[str, Tensor] = {}
    outline = _mapped(payload, lambda path, tensor: _taken(path, tensor, tensors))
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    group.on_main(lambda: check_space(target, need))
    name = f"{target.stem}-{group.broadcast(uuid.uuid4().hex[:8])}{SUFFIX}"
    temporary = target.with_name(f"{TEMPORARY}{name}")
    try:
        save(tensors, storage_writer=FileSystemWriter(temporary), process_group=group.control)
    except CheckpointException as error:
        if group.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _not_written(target, error.failures, need) from None
    own = {path.name: _facts(path) for path in temporary.glob(f"__{group.rank}_*")}
    files = {name: facts for part in group.gather(own) for name, facts in part.items()}
    if group.is_main:
        files[".metadata"] = _facts(temporary / ".metadata")
    group.on_main(lambda: _move(temporary, target.with_name(name)))
    return {**outline, "shards": {"folder": name, "files": files}}


def check(payload: Mapping[str, Any], path: Path) -> None:
    """Verify the files that an outline lists; make its folder an absolute path.

    Raises DamagedCheckpointError.
    """
    shards = payload.get("shards")
    if shards is None:
        return
    try:
        folder = path.resolve().parent / Path(shards["folder"]).name
        known = {Path(n).name: (f["size"], f["sha256"]) for n, f in shards["files"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: its list of shards is malformed: {error!r}") from None
    for name, facts in known.items():
        file = folder / name
        try:
            same = (file.stat().st_size, digest(file)) == facts
        except OSError as error:
            reason = f"{path}: cannot read its shard {file}: {error.strerror}"
            raise DamagedCheckpointError(reason) from error
        if not same:
            raise DamagedCheckpointError(f"{path}: its shard {file} changed after it was saved")
    shards["folder"] = str(folder)


def read(
    payload: Mapping[str, Any], parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return `payload` with the values of its sharded tensors, unsharded on the host.

    Tensors below the name of one of `parameters` are sharded like it, and each process reads its
    own part only.
    """
    shards = payload.get("shards")
    if shards is None:
        return dict(payload)
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(Path(shards["folder"]))
    tensors: dict[str, Any] = {}
    known = parameters or {}
    filled: dict[str, Any] = _mapped(
        payload, lambda path, tensor: _place(path, tensor, known, tensors)
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # No collective: all processes can read all files.
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        raise DamagedCheckpointError(f"{shards['folder']}: cannot be read: {cause}") from cause
    del filled["shards"]
    return filled


def shard_facts(payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what the index records of the shards: the name of their folder, if any."""
    shards = payload.get("shards")
    return {"shards": Path(shards["folder"]).name} if shards else {}


def remove_unused(folder: Path, index: Index) -> None:
    """Remove the shards in `folder` that no checkpoint refers to, as far as possible."""
    used = {e.facts.get("shards") for e in (*index.files.values(), *index.names.values())}
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def _mapped(tree: Any, leaf: Callable[[tuple[str, ...], Tensor], Any], path: Any = ()) -> Any:
    """Return nested dicts, lists and tuples with `leaf(path, tensor)` in place of each tensor."""
    if isinstance(tree, Tensor):
        return leaf(path, tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, leaf, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, leaf, (*path, str(i))) for i, value in enumerate(tree))
    return tree


def _taken(path: tuple[str, ...], tensor: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    if not hasattr(tensor, "device_mesh"):
        return tensor
    tensors["/".join(path)] = tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _place(
    path: tuple[str, ...],
    tensor: Tensor,
    parameters: Mapping[str, Tensor],
    tensors: dict[str, Any],
) -> Tensor:
    """Allocate the memory for a sharded tensor."""
    if tensor.device.type != "meta":
        return tensor
    owner = next((parameters[name] for name in reversed(path) if name in parameters), None)
    if owner is not None and hasattr(owner, "device_mesh") and owner.shape == tensor.shape:
        room = torch.empty_like(owner, dtype=tensor.dtype, requires_grad=False)
    else:
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensors["/".join(path)] = room
    return room


def _reader(folder: Path) -> Any:
    """Return torch's reader, whose `.metadata` was checked before it is unpickled."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    described = _described(folder / ".metadata")
    if not isinstance(described, Metadata):
        raise CheckpointError(f"{folder}: its .metadata describes no tensors")
    metadata: Metadata = described

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    return Reader(folder)


def _described(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # unpickling damaged bytes can raise any type
        raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a type that `.metadata` may hold. Raises CheckpointError for others."""
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
        if f"{module}.{name}" in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        kind = "code" if is_code(f"{module}.{name}") else "an object of type"
        raise CheckpointError(f"refused: holds {kind} ({module}.{name})")


def _facts(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest(path)}


def _move(temporary: Path, folder: Path) -> None:
    try:
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(folder, error) from error


def _not_written(target: Path, failures: Mapping[int, Any], need: int) -> StorageError:
    """Return the error of the first process that could not write."""
    error = failures[min(failures)][0]
    if isinstance(error, OSError):
        return storage_error(target, error, need=need)
    try:
        check_space(target, need)  # torch reports a full disk without its errno
    except StorageError as full:
        return full
    return StorageError(f"cannot write {target}: {error}")
