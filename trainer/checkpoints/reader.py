"""Read checkpoints: verified against their index, of this format, and of a run's form."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from regimen.conf.errors import lacks_memory
from regimen.conf.json_text import form_fault, plain_json
from regimen.trainer.checkpoints import shards as checkpoint_shards
from regimen.trainer.checkpoints.archive import (
    DamagedCheckpointError,
    digest,
    read_archive,
    read_safetensors,
)
from regimen.trainer.checkpoints.borrowed import left_out, read_entries
from regimen.trainer.errors import CheckpointError, device_failed
from regimen.trainer.files.atomic import regular, write_json
from regimen.trainer.files.names import ForeignNameError, checked_name, path_below
from regimen.trainer.state import TrainState

FORMAT_VERSION = 2
INDEX = "index.json"
_ENTRY: Mapping[str, Any] = {
    **dict.fromkeys(("file", "sha256"), str),
    **dict.fromkeys(("step", "size"), int),
    **dict.fromkeys(("metrics", "facts"), dict),
}
_MOST_VALUES = 5_000_000
_WEIGHTS = ("model", "ema", "callbacks", "shards", "format_version")  # of a run's checkpoint
_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict")
_DICTS = ("model", "optimizer", "lr_scheduler", "scaler", "ema", "callbacks", "state")
_PARTS: Mapping[str, type] = {**dict.fromkeys(_DICTS, dict), "rng": list, "config": str}
_STATE: Mapping[str, type] = {
    **dict.fromkeys(("counters", "metrics", "roles", "made_with"), dict),
    **dict.fromkeys(("sums", "epoch_sums", "loader", "own", "unsaved"), list),
    "world_size": int,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint file: its step, metrics, size and digest."""

    file: str
    step: int
    size: int  # bytes
    sha256: str
    metrics: dict[str, float | None]  # None: not finite
    facts: dict[str, Any]  # torch, threads, device, world_size, when it was saved


@dataclass(slots=True)
class Index:
    """`index.json`: the entries by file name, and those that the names `last`, `best` refer to."""

    files: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, Entry] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)  # of the weights: float32[64, 3, 3, 3]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the index of `folder`: empty if missing, or damaged (with a warning)."""
        try:
            content = plain_json(regular(folder / INDEX).read_bytes())
            files = {name: _entry(fields) for name, fields in content["files"].items()}
            names = {name: _entry(fields) for name, fields in content["names"].items()}
            for name in (*files, *names):
                checked_name(name)
            for entry in (*files.values(), *names.values()):
                path_below(folder, entry.file)
                path_below(folder, entry.facts.get("shards", INDEX))
            return cls(files, names, dict(content["layout"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged and is set up anew (%s)", folder / INDEX, error)
            return cls()

    def write(self, folder: Path) -> None:
        """Replace the index of `folder`, durably. Raises StorageError."""
        write_json(folder / INDEX, asdict(self))

    def digests(self, path: Path) -> set[str] | None:
        """Return the digests that a file may have; None if the index does not list it."""
        if path.name in self.files:
            return {self.files[path.name].sha256}
        if path.stem not in self.names:
            return None
        for other in path.parent.glob("step-*.pt"):
            # The index is written last: the name may already refer to this checkpoint.
            if other.name not in self.files:
                return None
        return {entry.sha256 for entry in (*self.files.values(), *self.names.values())}


def is_inside(checkpoint: Path, run_dir: Path | None) -> bool:
    """Return whether a checkpoint is one of the run in `run_dir`."""
    return run_dir is not None and checkpoint.parent.parent.resolve() == run_dir.resolve()


def _entry(fields: dict[str, Any]) -> Entry:
    fault = form_fault(fields, _ENTRY)
    if fault is not None:
        raise ValueError(fault)
    return Entry(**fields)


def read_checkpoint(path: Path, attempts: int = 5) -> dict[str, Any]:
    """Return the checkpoint in `path` on the CPU; sharded tensors are on the meta device.

    Its bytes are compared with the index of its folder, or where that does not list it, with its
    archive's CRCs. It is read again if a running process replaced it meanwhile. Raises
    CheckpointError.
    """
    before = _identity(path)
    try:
        digests = Index.read(path.parent).digests(path)
        payload = read_archive(path, crcs=digests is None)
        if not isinstance(payload, dict) or "format_version" not in payload:
            raise CheckpointError(f"{path}: not a checkpoint of a run: it has no format_version")
        version = payload["format_version"]
        if version != FORMAT_VERSION:
            order = ">" if isinstance(version, int) and version > FORMAT_VERSION else "<"
            raise CheckpointError(f"{path}: format {version!r} {order} supported {FORMAT_VERSION}")
        if digests is not None and digest(path) not in digests:  # last, for the better error
            raise DamagedCheckpointError(f"{path}: the file changed after it was saved (sha256)")
        checkpoint_shards.check(payload, path)
    except DamagedCheckpointError:
        if attempts > 1 and _identity(path) != before:
            return read_checkpoint(path, attempts - 1)
        raise
    return payload


def _identity(path: Path) -> list[tuple[int, int] | None]:
    """Return values that change when the file or its index is replaced."""
    identity: list[tuple[int, int] | None] = []
    for file in (path, path.parent / INDEX):
        if file.exists():
            status = file.stat()
            identity.append((status.st_ino, status.st_mtime_ns))
        else:
            identity.append(None)
    return identity


def read_whole(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path` on the CPU, including the values of its shards."""
    return checkpoint_shards.read(read_checkpoint(path))


def model_only(path: Path, average: bool = False) -> dict[str, Tensor]:
    """Return the weights in `path` by name: a checkpoint, a state dict or a .safetensors file.

    A run directory means its best checkpoint, or else its last. `average`: the average of the
    weights (EMA, SWA) if a checkpoint has one. Raises CheckpointError.
    """
    if path.is_dir():
        path = _checkpoint_of(path)
    payload: Any = read_safetensors(path) if path.suffix == ".safetensors" else read_archive(path)
    if isinstance(payload, Mapping) and "format_version" in payload:
        payload = read_checkpoint(path)
        for entry in read_entries(payload, f"{path}: "):
            raise CheckpointError(
                f"{path}: its frozen weights are in {entry['folder']}: `regimen convert --whole` "
                "writes a file that holds all weights"
            )
        payload = checkpoint_shards.read({k: payload[k] for k in _WEIGHTS if k in payload})
        averaged = _averaged_model(payload) if average else None
        if averaged is not None:
            _log.info("%s: loading the average of the weights instead of the last ones", path)
            payload = averaged
    if isinstance(payload, Mapping):
        weights = next((payload[key] for key in _WEIGHT_KEYS if key in payload), payload)
        tensors = weights.values() if isinstance(weights, Mapping) else ()
        if tensors and all(isinstance(value, Tensor) for value in tensors):
            return {str(name): value for name, value in weights.items()}
    raise CheckpointError(f"{path}: contains no weights: expected a dict of tensors")


def best_or_last(folder: Path) -> Path | None:
    """Return the checkpoint to evaluate: the best, or else the last; None if neither exists."""
    return next(filter(Path.exists, (folder / "best.pt", folder / "last.pt")), None)


def _checkpoint_of(folder: Path) -> Path:
    """Return the checkpoint to evaluate of a run directory, or of the folder of its checkpoints."""
    path = best_or_last(folder / "checkpoints") or best_or_last(folder)
    if path is None:
        raise CheckpointError(f"{folder}: it contains neither best.pt nor last.pt")
    try:
        return path_below(folder, path.relative_to(folder).as_posix())
    except ForeignNameError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _averaged_model(payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state of the first callback that has averaged weights; None without any."""
    for state in (payload.get("ema"), *(payload.get("callbacks") or {}).values()):
        if isinstance(state, Mapping) and state.get("averaged", 1) and state.get("model"):
            return state
    return None


def compare_names(
    payload: Mapping[str, Any], model_state: Mapping[str, Any], path: Path | None = None
) -> None:
    """Compare names, shapes and dtypes of a checkpoint's weights with the model's.

    Raises CheckpointError with the first difference in the model's order, and a count of the rest.
    """
    saved = payload["model"]
    elsewhere = left_out(payload)
    differences = []
    for name in {**model_state, **saved}:
        if name in elsewhere and name not in saved:
            continue  # the model has read it itself
        actual = describe_weight(saved.get(name))
        expected = describe_weight(model_state.get(name))
        if actual != expected:
            differences.append(f"{name} is {actual} in it, {expected} in the model")
    if differences:
        more = f" (+{len(differences) - 1} more)" if len(differences) > 1 else ""
        raise CheckpointError(f"{_prefix(path)}does not fit the model: {differences[0]}{more}")


def describe_weight(value: Any) -> str:
    """Return dtype and shape of a tensor, as in `float32[64, 3, 3, 3]`, or the type of a value."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    return "missing" if value is None else type(value).__name__


def check_payload(payload: Mapping[str, Any], path: Path | None) -> None:
    """Raise CheckpointError, naming the first key that is missing or has the wrong type.

    A file can load safely and still hold anything: each reader of a run's state calls this first.
    """
    for problem in _payload_problems(payload):
        raise CheckpointError(f"{_prefix(path)}not a checkpoint of a run: {problem}")
    read_entries(payload, _prefix(path))


def _prefix(path: Path | None) -> str:
    return "" if path is None else f"{path}: "


def _payload_problems(payload: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrong_types("", payload, _PARTS)
    state: Any = payload["state"]
    yield from _wrong_types("state.", state, _STATE)
    counters: Any = {"epoch_samples": 0, **state["counters"]}  # which earlier versions lack
    for name in TrainState().state_dict():
        count = counters.get(name)
        if type(count) is not int or count < 0:
            yield f"state.counters.{name} is no count but {count!r}"[:200]

    pending: list[Any] = [payload]
    visited = 0  # a value that several containers share is visited in each of them
    while pending:
        member = pending.pop()
        visited += 1
        if visited > _MOST_VALUES:
            yield f"it expands to more than {_MOST_VALUES} values"
        if isinstance(member, Tensor):
            # A view with strides of 0 may claim any size, and a copy of it would have that size.
            has_storage = not member.is_meta and member.layout is torch.strided
            if has_storage and member.nbytes > member.untyped_storage().nbytes():
                yield f"a tensor of {list(member.shape)} is larger than what is stored of it"
        elif isinstance(member, dict):
            pending.extend(member.values())
        elif isinstance(member, list | tuple | set):
            pending.extend(member)


def _wrong_types(prefix: str, values: Any, types: Mapping[str, type]) -> Iterator[str]:
    for key, kind in types.items():
        if not isinstance(values.get(key), kind):
            yield f"{prefix}{key} is missing, or no {kind.__name__}"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn exceptions raised by a state that does not fit into a CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if hasattr(error, "exit_code") or lacks_memory(error) or device_failed(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0][:500]
        raise CheckpointError(
            f"{what} of the checkpoint cannot be loaded: {type(error).__name__}: {first_line}"
        ) from error
