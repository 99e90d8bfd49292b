"""Sharded checkpoints by torch.distributed.checkpoint: each process writes its part.

`step-00000120.pt` is then an outline: a checkpoint whose sharded tensors are on the meta device.
Its key `shards` names the folder with their values, and the digests of the files in it.
"""

import importlib
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor

from regimen.trainer.checkpoints.archive import DamagedCheckpointError, digest
from regimen.trainer.distributed import Group
from regimen.trainer.errors import CheckpointError, StorageError
from regimen.trainer.files.atomic import TEMPORARY, storage_error, storing, sync_folder
from regimen.trainer.files.names import ForeignNameError, path_below
from regimen.trainer.task import tensors_of

SUFFIX = ".shards"
_DESCRIPTION = ".metadata"
# The classes that .metadata may name; torch would unpickle any other, and run its code.
_ALLOWED = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
    *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size"),
    *("PosixPath", "WindowsPath", "PurePosixPath"),
}
_ALLOWED_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local")
_CHECKPOINT = "torch.distributed.checkpoint"


def write(payload: Mapping[str, Any], target: Path, group: Group) -> dict[str, Any]:
    """Write the sharded tensors of `payload` beside `target`; return the outline for `target`.

    A collective. The shards are durable on return. Raises StorageError on all processes.
    """
    dcp = importlib.import_module(_CHECKPOINT)

    tensors = {}

    def extract(path: str, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "device_mesh"):
            return tensor
        tensors[path] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    outline = _map_with_paths(payload, extract)
    # All processes write into one folder, so the first one chooses its name.
    suffix = group.broadcast(uuid.uuid4().hex[:8])
    name = f"{target.stem}-{suffix}{SUFFIX}"
    temporary = target.with_name(f"{TEMPORARY}{name}")
    folder = target.with_name(name)
    try:
        writer = dcp.FileSystemWriter(temporary)
        dcp.save(tensors, storage_writer=writer, process_group=group.control)
    except dcp.CheckpointException as failed:
        if group.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        error = failed.failures[min(failed.failures)][0]  # of the first process that failed
        if isinstance(error, OSError):
            raise storage_error(target, error) from None
        raise StorageError(f"cannot write {target}: {error}") from None

    # Each process hashes the files that it wrote; the outline lists the digests of all.
    digests = {path.name: digest(path) for path in temporary.glob(f"__{group.rank}_*")}
    files = {name: sha256 for part in group.gather(digests) for name, sha256 in part.items()}

    def move() -> None:
        files[_DESCRIPTION] = digest(temporary / _DESCRIPTION)
        with storing(folder):
            sync_folder(temporary)
            temporary.rename(folder)
            sync_folder(folder.parent)

    group.run_on_main(move)
    return {**outline, "shards": {"folder": name, "files": files}}


def check(payload: Mapping[str, Any], path: Path) -> None:
    """Verify the files that an outline lists; make its folder an absolute path.

    Raises DamagedCheckpointError.
    """
    shards = payload.get("shards")
    if shards is None:
        return
    try:
        folder = path_below(path.resolve().parent, shards["folder"])
        digests = {path_below(folder, name): sha256 for name, sha256 in shards["files"].items()}
    except ForeignNameError as error:
        raise CheckpointError(f"{path}: refused: of its shards {error}") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: its list of shards is malformed: {error!r:.200}") from None
    if folder / _DESCRIPTION not in digests:
        raise CheckpointError(f"{path}: its list of shards is malformed: no {_DESCRIPTION}")
    for file, sha256 in digests.items():
        try:
            is_unchanged = digest(file) == sha256
        except OSError as error:
            raise DamagedCheckpointError(
                f"{path}: cannot read its shard {file}: {error.strerror}"
            ) from error
        if not is_unchanged:
            raise DamagedCheckpointError(f"{path}: its shard {file} changed after it was saved")
    shards["folder"] = str(folder)


def read(
    payload: Mapping[str, Any], parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return `payload` with the values of its sharded tensors, unsharded on the host.

    Tensors below the name of one of `parameters` are sharded like it, and each process reads its
    own part only. Raises CheckpointError.
    """
    if payload.get("shards") is None:
        return dict(payload)
    dcp = importlib.import_module(_CHECKPOINT)

    folder = Path(payload["shards"]["folder"])
    files = payload["shards"]["files"]
    _check_size(payload, folder, files)

    owners = parameters or {}
    tensors = dict[str, Any]()

    def allocate(path: str, tensor: Tensor) -> Any:
        if tensor.device.type != "meta":
            return tensor
        owner: Any = next((owners[n] for n in reversed(path.split("/")) if n in owners), None)
        if hasattr(owner, "device_mesh") and owner.shape == tensor.shape:
            tensors[path] = torch.empty_like(owner, dtype=tensor.dtype, requires_grad=False)
        else:
            tensors[path] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return tensors[path]

    filled: dict[str, Any] = _map_with_paths(payload, allocate)
    try:
        with open(folder / _DESCRIPTION, "rb") as file:
            metadata = _read_metadata(file, files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / _DESCRIPTION}: {error}") from None
    except Exception as error:  # unpickling damaged bytes can raise any type
        raise DamagedCheckpointError(f"{folder / _DESCRIPTION}: cannot be read: {error}") from error

    reader = dcp.FileSystemReader(folder)
    reader.read_metadata = lambda *_, **__: metadata
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # No collective: all processes can read all files.
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        raise DamagedCheckpointError(f"{folder}: cannot be read: {cause}") from cause
    del filled["shards"]
    return filled


def _check_size(payload: Mapping[str, Any], folder: Path, files: Iterable[str]) -> None:
    """Raise CheckpointError for tensors larger than the files, before memory is allocated."""
    claimed = sum(tensor.nbytes for tensor in tensors_of(payload) if tensor.is_meta)
    stored = sum((folder / name).stat().st_size for name in files)
    if claimed > stored:
        raise CheckpointError(
            f"{folder}: {claimed} bytes of tensors cannot be in files of {stored} bytes"
        )


def _map_with_paths(tree: Any, leaf: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """Return nested dicts, lists and tuples with `leaf(path, tensor)` in place of each tensor."""
    if isinstance(tree, Tensor):
        return leaf(path, tree)
    if isinstance(tree, Mapping):
        return {key: _map_with_paths(v, leaf, f"{path}/{key}") for key, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_with_paths(v, leaf, f"{path}/{i}") for i, v in enumerate(tree))
    return tree


def _read_metadata(file: BinaryIO, files: Container[str]) -> Any:
    """Return torch's `Metadata` of shards, built again from the plain values of a `.metadata`.

    Raises CheckpointError for code and for a file that is none of `files`; for values of another
    form whatever their use raises.
    """
    classes = importlib.import_module(f"{_CHECKPOINT}.metadata")
    stored = _Unpickler(file).load().state
    tensors = {}
    for name, tensor in stored["state_dict_metadata"].items():
        chunks = [
            classes.ChunkStorageMetadata(_size(chunk, "offsets"), _size(chunk, "sizes"))
            for chunk in tensor.state["chunks"]
        ]
        properties = classes.TensorProperties()
        tensors[name] = classes.TensorStorageMetadata(properties, _size(tensor, "size"), chunks)
    storage = {}
    for index, location in stored["storage_data"].items():
        path = location.state["relative_path"]
        if path not in files:
            raise CheckpointError(f"refused: {path!r:.100} is none of its files")
        fqn = index.state["fqn"]
        key = classes.MetadataIndex(fqn, _size(index, "offset"), index.state["index"])
        storage[key] = SimpleNamespace(
            relative_path=path,
            offset=location.state["offset"],
            length=location.state["length"],
            transform_descriptors=None,
        )
    return classes.Metadata(tensors, storage_data=storage)


def _size(described: Any, name: str) -> torch.Size:
    (numbers,) = described.state[name].arguments
    return torch.Size(numbers)


class _Described:
    """Stands for an object of any class in a `.metadata`: its constructor's arguments, its state.

    A pickle can set attributes of the classes that it names, and so change them for the whole
    process. Of this class it cannot: without an instance `__setstate__` lacks an argument.
    """

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for an allowed class. Raises CheckpointError for any other."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED and (module in _ALLOWED_MODULES or module.startswith(_CHECKPOINT)):
            return _Described
        raise CheckpointError(f"refused: contains code ({module}.{name})"[:200])
