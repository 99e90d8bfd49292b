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
            files, names = (
                {name: _entry(fields) for name, fields in content[key].items()}
                for key in ("files", "names")
            )
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
        """Return the digests that a file may have; None where the index does not tell."""
        if path.name in self.files:
            return {self.files[path.name].sha256}
        # A name may already lead to a checkpoint that the index, written last, does not list yet.
        listed = all(other.name in self.files for other in path.parent.glob("step-*.pt"))
        if path.stem not in self.names or not listed:
            return None
        return {entry.sha256 for entry in (*self.files.values(), *self.names.values())}


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
        known = Index.read(path.parent).digests(path)
        payload = read_archive(path, crcs=known is None)
        if not isinstance(payload, dict) or "format_version" not in payload:
            raise CheckpointError(f"{path}: not a checkpoint of a run: it has no format_version")
        if (version := payload["format_version"]) != FORMAT_VERSION:
            order = ">" if isinstance(version, int) and version > FORMAT_VERSION else "<"
            raise CheckpointError(f"{path}: format {version!r} {order} supported {FORMAT_VERSION}")
        if known is not None and digest(path) not in known:  # last, for the better error
            raise DamagedCheckpointError(f"{path}: the file changed after it was saved (sha256)")
        checkpoint_shards.check(payload, path)
    except DamagedCheckpointError:
        if attempts > 1 and _identity(path) != before:
            return read_checkpoint(path, attempts - 1)
        raise
    return payload


def _identity(path: Path) -> list[tuple[int, int] | None]:
    """Return values that change when the file or its index is replaced."""
    files = (path, path.parent / INDEX)
    return [(f.stat().st_ino, f.stat().st_mtime_ns) if f.exists() else None for f in files]


def read_whole(path: Path) -> dict[str, Any]:
    """Return the checkpoint in `path` on the CPU, including the values of its shards."""
    return checkpoint_shards.read(read_checkpoint(path))


def model_only(path: Path, average: bool = False) -> dict[str, Tensor]:
    """Return the weights in `path` by name: a checkpoint, a state dict or a .safetensors file.

    A run directory means its best checkpoint, or else its last. `average`: the average of the
    weights (EMA, SWA) if a checkpoint has one. Raises CheckpointError.
    """
    if path.is_dir():
        names = ("checkpoints/best.pt", "checkpoints/last.pt", "best.pt", "last.pt")
        found = next((name for name in names if (path / name).is_file()), None)
        if found is None:
            raise CheckpointError(f"{path}: it contains neither best.pt nor last.pt")
        try:
            path = path_below(path, found)
        except ForeignNameError as error:
            raise CheckpointError(f"{path}: {error}") from error
    payload: Any = read_safetensors(path) if path.suffix == ".safetensors" else read_archive(path)
    if isinstance(payload, Mapping):
        if "format_version" in payload:
            payload = read_checkpoint(path)
            payload = checkpoint_shards.read({k: payload[k] for k in _WEIGHTS if k in payload})
            kept = (payload.get("ema"), *(payload.get("callbacks") or {}).values())
            means = (k for k in kept if isinstance(k, Mapping) and k.get("averaged", 1))
            if average and (mean := next((k for k in means if k.get("model")), None)):
                _log.info("%s: loading the average of the weights instead of the last ones", path)
                payload = mean
        inner = next((payload[key] for key in _WEIGHT_KEYS if key in payload), payload)
        tensors = inner.values() if isinstance(inner, Mapping) else ()
        if tensors and all(isinstance(value, Tensor) for value in tensors):
            return {str(name): value for name, value in inner.items()}
    raise CheckpointError(f"{path}: contains no weights: expected a dict of tensors")


def compare_names(
    payload: Mapping[str, Any], model_state: Mapping[str, Any], path: Path | None = None
) -> None:
    """Compare names, shapes and dtypes of a checkpoint's weights with the model's.

    Raises CheckpointError with the first difference in the model's order, and a count of the rest.
    """
    saved = payload["model"]
    pairs = {n: (form(saved.get(n)), form(model_state.get(n))) for n in {**model_state, **saved}}
    misfits = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    if misfits:
        name, inside, wanted = misfits[0]
        more = f" (+{len(misfits) - 1} more)" if len(misfits) > 1 else ""
        first = f"{name} is {inside} in it, {wanted} in the model{more}"
        raise CheckpointError(f"{path}: " * bool(path) + f"does not fit the model: {first}")


def form(value: Any) -> str:
    """Return dtype and shape of a tensor, as in `float32[64, 3, 3, 3]`, or the type of a value."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    return "missing" if value is None else type(value).__name__


def check_payload(payload: Mapping[str, Any], path: Path | None) -> None:
    """Raise CheckpointError, naming the first key that is missing or of the wrong kind.

    A file can load safely and still hold anything: each reader of a run's state calls this first.
    """
    for misfit in _misfits(payload):
        raise CheckpointError(f"{path}: " * bool(path) + f"not a checkpoint of a run: {misfit}")


def _misfits(payload: Mapping[str, Any]) -> Iterator[str]:
    state: Any = payload.get("state")
    for prefix, values, wanted in (("", payload, _PARTS), ("state.", state, _STATE)):
        for key, kind in wanted.items():
            if not isinstance(values.get(key), kind):
                yield f"{prefix}{key} is missing, or no {kind.__name__}"
    counters: Any = {"epoch_samples": 0, **state["counters"]}  # which earlier versions lack
    for name in TrainState().state_dict():
        count = counters.get(name)
        if type(count) is not int or count < 0:
            yield f"state.counters.{name} is no count but {count!r}"[:200]
    pending, visited = [payload], 0  # a value that stands in several places is visited in each
    while pending:
        member, visited = pending.pop(), visited + 1
        if visited > _MOST_VALUES:
            yield f"it expands to more than {_MOST_VALUES} values"
        if isinstance(member, Tensor):
            whole = member.is_meta or member.layout is not torch.strided
            if not whole and member.nbytes > member.untyped_storage().nbytes():
                yield f"a tensor of {list(member.shape)} is larger than what is stored of it"
        elif isinstance(member, dict | list | tuple | set):
            pending.extend(member.values() if isinstance(member, dict) else member)


@contextmanager
def taking_over(what: str) -> Iterator[None]:
    """Turn exceptions raised by a state that does not fit into a CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if hasattr(error, "exit_code") or lacks_memory(error) or device_failed(error):
            raise
        line = (str(error).strip().splitlines() or [""])[0][:500]
        reason = f"{type(error).__name__}: {line}"
        raise CheckpointError(f"{what} of the checkpoint cannot be loaded: {reason}") from error
