"""The tensors of a network to quantize, found by one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYERS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_CONVOLUTIONS = LAYERS[:3]
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Their outputs are values of their inputs: quantized inputs give quantized outputs.
_KEEPS_VALUES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.Flatten,
    nn.Unflatten,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with integer weights."""

    name: str
    place: int  # of its input
    norm: str | None  # the BatchNorm after it, which is folded into it


@dataclass(frozen=True, slots=True)
class Places:
    """The layers of a network that are quantized, and the tensors between them.

    `names`: `output:MODULE` is the output of a module, `input:MODULE` its input.
    """

    names: tuple[str, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    module: nn.Module
    given: Tensor
    returned: Tensor


def find_places(model: nn.Module, forward: Callable[[nn.Module], Any]) -> Places:
    """Find the places of a network that `forward(model)` calls once, in evaluation mode.

    Quantized are the weights and the inputs of convolutions and linear layers (of exactly these
    classes: a subclass may compute anything), and the outputs of convolutions, after the BatchNorm
    and the ReLU that follow. Layers that are called several times stay as they are, and so does
    the output of the network.
    """
    with _recorded(model) as calls, torch.no_grad():
        result = forward(model)
    times = Counter(call.name for call in calls)
    users: dict[int, list[_Call]] = {}
    for call in calls:
        users.setdefault(id(call.given), []).append(call)
    made_by: dict[int, str] = {}
    places: dict[str, int] = {}
    layers: list[Layer] = []

    def place(name: str) -> int:
        return places.setdefault(name, len(places))

    for call in calls:
        source = made_by.get(id(call.given))
        if type(call.module) in LAYERS and times[call.name] == 1:
            at = place(f"input:{call.name}" if source is None else f"output:{source}")
            norm, end = _end_of(call, users, times)
            layers.append(Layer(call.name, at, None if norm is None else norm.name))
            if type(call.module) in _CONVOLUTIONS and end.returned is not result:
                place(f"output:{end.name}")
        if isinstance(call.module, _KEEPS_VALUES):
            if source is not None:
                made_by[id(call.returned)] = source
        elif times[call.name] == 1:
            made_by[id(call.returned)] = call.name
    return Places(tuple(places), tuple(layers))


def _end_of(
    layer: _Call, users: dict[int, list[_Call]], times: Counter[str]
) -> tuple[_Call | None, _Call]:
    """Return the BatchNorm after a layer, if any, and the last of layer, BatchNorm and ReLU."""

    def after(call: _Call, kinds: tuple[type[nn.Module], ...]) -> _Call | None:
        found = [user for user in users.get(id(call.returned), []) if user is not call]
        alone = len(found) == 1 and isinstance(found[0].module, kinds) and times[found[0].name] == 1
        return found[0] if alone else None

    norm = after(layer, _NORMS)
    end = norm or layer
    return norm, after(end, (nn.ReLU,)) or end


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[_Call]]:
    """Record the calls of modules without children, in evaluation mode."""
    calls: list[_Call] = []
    modes = [(module, module.training) for module in model.modules()]

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, returned: Any) -> None:
            if len(given) == 1 and isinstance(given[0], Tensor) and isinstance(returned, Tensor):
                calls.append(_Call(name, module, given[0], returned))  # alive: ids stay unique

        return hook

    leaves = [(n, m) for n, m in model.named_modules() if not any(m.children())]
    handles = [module.register_forward_hook(record(name)) for name, module in leaves]
    try:
        model.eval()
        yield calls
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()
