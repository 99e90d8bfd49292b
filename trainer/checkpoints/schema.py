"""The keys and types of a run's checkpoint, checked before any of it is used.

A file can load safely and still hold anything. Each reader of a run's state calls `check_payload`
first, so that the user gets one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from trainer.errors import CheckpointError
from trainer.state import TrainState

_PARTS: Mapping[str, type] = {
    "model": dict,
    "optimizer": dict,
    "lr_scheduler": dict,
    "scaler": dict,
    "ema": dict,
    "callbacks": dict,
    "state": dict,
    "rng": list,
    "config": str,
}
_STATE: Mapping[str, type] = {
    "counters": dict,
    "sums": list,
    "own": list,
    "metrics": dict,
    "world_size": int,
}
_LISTS = ("sums", "own")  # one entry for each process
_LATER_LISTS = ("epoch_sums", "loader", "unsaved")  # missing in older checkpoints
_SUMS: Mapping[str, type] = {"sums": dict, "counts": dict}
_RNG: Mapping[str, type] = {"torch": torch.Tensor, "cuda": list, "python": dict, "numpy": dict}
_MOST_VALUES = 5_000_000  # shared containers are visited again each time


def check_payload(payload: Mapping[str, Any], path: Path | None) -> None:
    """Raise CheckpointError, naming the first key that is missing or of the wrong kind."""
    where = f"{path}: " if path else ""
    try:
        _check(payload)
    except _MisfitError as error:
        raise CheckpointError(f"{where}not a checkpoint of a run: {error}") from None


@contextmanager
def taking_over(what: str) -> Iterator[None]:
    """Turn exceptions raised by a state that does not fit into a CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if hasattr(error, "exit_code") or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise CheckpointError(f"{what} of the checkpoint cannot be loaded: {reason}") from error


class _MisfitError(Exception):
    pass


def _check(payload: Mapping[str, Any]) -> None:
    _check_keys(payload, _PARTS, "")
    state = payload["state"]
    _check_keys(state, _STATE, "state.")
    _check_counters(state["counters"])
    roles = state.get("roles", {})  # missing in older checkpoints
    if not isinstance(roles, dict) or not all(isinstance(n, str | None) for n in roles.values()):
        raise _MisfitError(f"state.roles is no dict of names but {roles!r}"[:200])
    processes = state["world_size"]
    lists = [k for k in (*_LISTS, *_LATER_LISTS) if k in state]
    for key, values in (("rng", payload["rng"]), *((f"state.{k}", state[k]) for k in lists)):
        if not isinstance(values, list):
            raise _MisfitError(f"{key} is no list but {type(values).__name__}")
        if processes < 1 or len(values) != processes:
            raise _MisfitError(f"{key} is of {len(values)} processes, state.world_size {processes}")
    for index, generators in enumerate(payload["rng"]):
        _check_keys(generators, _RNG, f"rng.{index}.")
    for key in ("sums", "epoch_sums"):
        for index, sums in enumerate(state.get(key, [])):
            _check_keys(sums, _SUMS, f"state.{key}.{index}.")
    for name, value in payload["model"].items():
        if not isinstance(name, str):
            raise _MisfitError(f"model has a name that is no text: {name!r}")
        if not isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            raise _MisfitError(f"model.{name} is no tensor but {type(value).__name__}")
    _Walk(sharded="shards" in payload).check(dict(payload))


def _check_keys(values: Any, wanted: Mapping[str, type], prefix: str) -> None:
    if not isinstance(values, dict):
        raise _MisfitError(f"{prefix.rstrip('.')} is no dict but {type(values).__name__}")
    for key, kind in wanted.items():
        if key not in values:
            raise _MisfitError(f"{prefix}{key} is missing")
        value = values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _MisfitError(f"{prefix}{key} is no {kind.__name__} but {type(value).__name__}")


def _check_counters(counters: Mapping[str, Any]) -> None:
    known = set(TrainState().state_dict())
    for name in (field.name for field in fields(TrainState) if field.name in known):
        if name not in counters:
            raise _MisfitError(f"state.counters.{name} is missing")
        value = counters[name]
        if type(value) is not int or value < 0:
            raise _MisfitError(f"state.counters.{name} is no count but {value!r}"[:200])


class _Walk:
    """Visit every value; refuse cycles and containers that expand without bound."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded  # meta tensors are then filled from the shards
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def check(self, value: Any, key: str = "") -> int:
        """Return the number of values, counting shared ones each time. Raises _MisfitError."""
        if isinstance(value, torch.Tensor):
            self._check_tensor(value, key)
            return 1
        if not isinstance(value, dict | list | tuple | set):
            return 1
        if id(value) in self._sizes:
            return self._sizes[id(value)]
        if id(value) in self._open or len(self._open) > _DEEPEST:
            raise _MisfitError(f"{key} contains itself, or is nested too deeply")
        self._open.add(id(value))
        members = value.items() if isinstance(value, dict) else enumerate(value)
        size = 1
        for name, member in members:
            size += self.check(member, f"{key}.{name}" if key else str(name)[:80])
            if size > _MOST_VALUES:
                raise _MisfitError(f"{key} expands to more than {_MOST_VALUES} values")
        self._open.discard(id(value))
        self._sizes[id(value)] = size
        return size

    def _check_tensor(self, tensor: torch.Tensor, key: str) -> None:
        if tensor.is_meta:
            if not self._sharded:
                raise _MisfitError(f"{key} is a tensor without data (on the meta device)")
        elif tensor.layout is torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise _MisfitError(f"{key} is larger than its storage")


_DEEPEST = 100


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]
