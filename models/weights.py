"""Read trained weights from a file, a run directory or torchvision, without executing code."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from torch import Tensor

from models.errors import NetworkError, WeightsError
from trainer.checkpoints.reader import read_weights as read_file
from trainer.errors import CheckpointError

log = logging.getLogger(__name__)
_wanted: ContextVar[bool] = ContextVar("initial_weights_wanted", default=True)


@contextmanager
def no_initial_weights() -> Iterator[None]:
    """Build models without reading their initial weights.

    Used before a checkpoint is loaded: a resumed or evaluated run must not need the files, or the
    network connection, of its initial weights.
    """
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


def weights_wanted() -> bool:
    """Return whether a model should load its initial weights; False on the meta device."""
    return _wanted.get() and torch.get_default_device().type != "meta"


def read_weights(
    source: str,
    checkpoint: Literal["best", "last"] = "best",
    prefix: str = "",
    average: bool = True,
) -> dict[str, Tensor]:
    """Return a state dict from `source`.

    `source` is a file (`.pt`, `.pth`, `.safetensors`), a run directory (its `checkpoint`) or
    `torchvision:ResNet18_Weights.DEFAULT`. `prefix` is removed from names; those without it are
    dropped. `average`: return the average of the weights (EMA, SWA) if a checkpoint has one.
    """
    if source.startswith("torchvision:"):
        state: Mapping[str, Any] = _from_torchvision(source.removeprefix("torchvision:"))
    else:
        state = _from_file(_locate(Path(source), checkpoint), average)
    chosen = {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    if not chosen:
        raise WeightsError(f"{source} has no name with the prefix {prefix!r}")
    return chosen


def fetch(entry: Any) -> dict[str, Tensor]:
    """Return the state dict of a torchvision weights entry, from its cache or the network."""
    try:
        return dict(entry.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"model.weights: cannot get {entry} from {entry.url}: {error}; where there is no "
            f"network, put the file in {Path(torch.hub.get_dir()) / 'checkpoints'}"
        ) from error


def _from_torchvision(name: str) -> dict[str, Tensor]:
    try:
        entry = torchvision.models.get_weight(name)
    except (KeyError, ValueError) as error:
        raise NetworkError(
            f"model.weights: torchvision has no weights named {name!r}; "
            "the form is torchvision:ResNet18_Weights.DEFAULT"
        ) from error
    return fetch(entry)


def _locate(path: Path, checkpoint: str) -> Path:
    path = path.expanduser()
    if path.is_dir():
        path = path / "checkpoints" / f"{checkpoint}.pt"
    if not path.is_file():
        raise NetworkError(f"model.weights: no file {path}")
    return path


def _from_file(path: Path, average: bool) -> Mapping[str, Any]:
    try:
        loaded = read_file(path)
    except CheckpointError as error:
        raise WeightsError(str(error)) from error
    averaged = _average(loaded)
    if average and averaged is not None:
        log.info("%s: loading the average of the weights instead of the last weights", path)
        return averaged
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise WeightsError(f"{path} is not a state dict, a mapping of names to tensors")
    return loaded


def _average(checkpoint: Any) -> Mapping[str, Any] | None:
    """Return the average of the weights (EMA or SWA) in a checkpoint; None if there is none."""
    if not isinstance(checkpoint, Mapping) or "format_version" not in checkpoint:
        return None
    states = [checkpoint.get("ema"), *(checkpoint.get("callbacks") or {}).values()]
    for state in states:
        if isinstance(state, Mapping) and state.get("model") and state.get("averaged", 1):
            found: Mapping[str, Any] = state["model"]
            return found
    return None
