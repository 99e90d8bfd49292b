"""Fine-tuning: load trained weights into a network whose head may have another size."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from models.errors import NetworkError, WeightsError
from models.resize import adapt_channels, find_head
from models.weights import read_weights, weights_wanted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The names of the weights that were loaded, and of those that were not."""

    loaded: tuple[str, ...]
    adapted: tuple[str, ...]  # of the first convolution, with another number of input channels
    resized: tuple[str, ...]  # of the head, with another number of classes: not loaded
    dropped: tuple[str, ...]  # excluded by `drop`
    missing: tuple[str, ...]  # in the network only
    unexpected: tuple[str, ...]  # in the weights only

    def __str__(self) -> str:
        """Return the number of loaded tensors, and the first names of each other kind."""
        kinds = ("adapted", "resized", "dropped", "missing", "unexpected")
        parts = [f"{len(self.loaded)} tensors loaded"]
        parts += [f"{kind}: {_names(getattr(self, kind))}" for kind in kinds if getattr(self, kind)]
        return "; ".join(parts)


def fine_tune(
    model: nn.Module,
    weights: str,
    checkpoint: Literal["best", "last"] = "best",
    prefix: str = "",
    drop: Sequence[str] = (),
    head: str | None = None,
    strict: bool = True,
    average: bool = True,
) -> nn.Module:
    """Load the weights of a file, a run directory or torchvision into `model`, and return it.

    Args:
        model: the network, built for the new classes.
        weights: a file, a run directory, or `torchvision:ResNet18_Weights.DEFAULT`.
        checkpoint: the checkpoint of a run directory.
        prefix: load only names with this prefix, and remove it from them.
        drop: globs over names that are not loaded.
        head: the module that may have another number of outputs (default: the last layer).
        strict: raise WeightsError for names that only the weights or only the network have.
        average: load the average of the weights (EMA, SWA) of a run that kept one.
    """
    if not weights_wanted():
        return model
    report = load_weights(model, read_weights(weights, checkpoint, prefix, average), drop, head)
    differing = (*report.missing, *report.unexpected)
    if strict and differing:
        raise WeightsError(
            f"{weights} does not fit the network: {report}; "
            "exclude names with model.drop, or allow it with model.strict=false"
        )
    log.log(
        logging.WARNING if differing else logging.INFO, "initial weights %s: %s", weights, report
    )
    return model


def load_weights(
    model: nn.Module,
    state: dict[str, Tensor],
    drop: Sequence[str] = (),
    head: str | None = None,
) -> LoadReport:
    """Load `state` into `model`; shapes may differ in the head and in the input channels only."""
    own = model.state_dict()
    dropped = _dropped(drop, [*state, *own])
    wanted = {name: value for name, value in state.items() if name not in dropped}
    shared = [name for name in wanted if name in own]
    head = find_head(model) if head is None else head
    resized, adapted = _differing(model, own, {name: wanted[name] for name in shared}, head)
    wanted |= adapted
    loaded = [name for name in shared if name not in resized]
    if not loaded:
        raise WeightsError(
            f"no name of the weights is in the network: {_names(tuple(state))} "
            f"against {_names(tuple(own))}; see model.prefix"
        )
    with torch.no_grad():
        for name in loaded:
            own[name].copy_(wanted[name])
    return LoadReport(
        loaded=tuple(loaded),
        adapted=tuple(adapted),
        resized=tuple(resized),
        dropped=tuple(name for name in state if name in dropped),
        missing=tuple(name for name in own if name not in state and name not in dropped),
        unexpected=tuple(name for name in wanted if name not in own),
    )


def _differing(
    model: nn.Module, own: dict[str, Tensor], given: dict[str, Tensor], head: str
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the names of a head of another size, and the adapted weight of the input layer."""
    first = next((n for n, p in model.named_parameters() if p.ndim == 4), None)
    resized: list[str] = []
    adapted: dict[str, Tensor] = {}
    for name, value in given.items():
        if value.shape == own[name].shape:
            continue
        if name.startswith(f"{head}.") and value.shape[1:] == own[name].shape[1:]:
            resized.append(name)
        elif name == first and _only_channels_differ(value, own[name]):
            adapted[name] = adapt_channels(value, own[name].shape[1])
        else:
            raise _misfit(name, value, own[name])
    return resized, adapted


def _dropped(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    dropped: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise NetworkError(
                f"model.drop: {pattern!r} matches no name among {_names(tuple(names))}"
            )
        dropped |= matches
    return dropped


def _only_channels_differ(given: Tensor, own: Tensor) -> bool:
    return given.ndim == 4 and given.shape[0] == own.shape[0] and given.shape[2:] == own.shape[2:]


def _misfit(name: str, given: Tensor, own: Tensor) -> WeightsError:
    return WeightsError(
        f"{name} has shape {tuple(given.shape)} in the weights and {tuple(own.shape)} in the "
        f"network; exclude it with model.drop=[{name}]"
    )


def _names(names: tuple[str, ...], show: int = 4) -> str:
    more = f" (+{len(names) - show} more)" if len(names) > show else ""
    return ", ".join(names[:show]) + more
