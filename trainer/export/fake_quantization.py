"""Fake quantization: a network in floats that rounds as an 8-bit integer network does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNT = "fake_quantization"  # the key of ranges in the state of a callback
LAYERS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_LEVELS = 255  # of activations, as unsigned integers of 8 bits
_LARGEST = 127  # of weights, as signed ones
_SMALLEST = 1e-12  # a scale: a channel may be all zeros


class Ranges:
    """The range of the inputs of each layer, to which they are rounded.

    Values are `low` to `high`, [layers], and always include zero. Layers are convolutions and
    linear layers of exactly these classes: a subclass may compute anything.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self.layers = [name for name, part in model.named_modules() if type(part) in LAYERS]
        count = len(self.layers)
        self.low, self.high = (torch.zeros(count, device=device) for _ in range(2))
        self.seen = torch.zeros(2, count, device=device)  # smallest and largest since `forget`
        self.known = False
        self.rounds = True  # where the ranges are known

    def at(self, x: Tensor, number: int) -> Tensor:
        """Record the inputs of a layer in training, and round them if their range is known."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                low, high = x.detach().aminmax()
                self.seen[0, number] = torch.minimum(self.seen[0, number], low)
                self.seen[1, number] = torch.maximum(self.seen[1, number], high)
        if not (self.known and self.rounds):
            return x
        scale = ((self.high[number] - self.low[number]) / _LEVELS).clamp_min(_SMALLEST)
        zero = (-self.low[number] / scale).round().clamp(0, _LEVELS).to(torch.int32)
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, _LEVELS)
        return rounded.to(x.dtype)

    def forget(self) -> None:
        """Reset the observed values."""
        self.seen.zero_()

    def follow(self, seen: Tensor, momentum: float) -> None:
        """Move the ranges towards `seen` by `1 - momentum`; the first call sets them."""
        weight = 1 - momentum if self.known else 1.0
        self.low.lerp_(seen[0], weight)
        self.high.lerp_(seen[1], weight)
        self.known = True

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by the names of their layers."""
        return {"layers": self.layers, "low": self.low, "high": self.high, "known": self.known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ranges. Raises ValueError for those of another network."""
        if list(state["layers"]) != self.layers:
            raise ValueError("the ranges are of a network with other layers")
        self.low.copy_(state["low"])
        self.high.copy_(state["high"])
        self.known = bool(state["known"])


class _Rounding(torch.autograd.Function):
    """Round weights to a grid; gradients pass unchanged.

    Half the cost of torch.fake_quantize_per_channel_affine, which also clips: nothing lies outside
    of a grid that reaches to the largest weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = (weight.flatten(1).abs().amax(1) / _LARGEST).float().clamp_min(_SMALLEST)
        scale = scale.view(-1, *[1] * (weight.ndim - 1))
        return (weight.float() / scale).round_().mul_(scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def rounded_weight(weight: Tensor) -> Tensor:
    """Return weights on the grid of each output channel; gradients pass."""
    rounded: Tensor = _Rounding.apply(weight)
    return rounded


class _Conv1d(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, rounded_weight(weight), bias)  # type: ignore[no-any-return]


class _Conv2d(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, rounded_weight(weight), bias)  # type: ignore[no-any-return]


class _Conv3d(nn.Conv3d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, rounded_weight(weight), bias)  # type: ignore[no-any-return]


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, rounded_weight(self.weight), self.bias)


_ROUNDED = dict(zip(LAYERS, (_Conv1d, _Conv2d, _Conv3d, _Linear), strict=True))


def attach(model: nn.Module, ranges: Ranges) -> Callable[[], None]:
    """Make a network round its layers' weights and inputs; return the undo function.

    Names and values of its parameters stay: only the classes of the layers change, to ones that
    round their weights.
    """
    undo: list[Callable[[], None]] = []
    for number, name in enumerate(ranges.layers):
        layer = model.get_submodule(name)
        undo.append(layer.register_forward_pre_hook(_rounds_input(ranges, number)).remove)
        undo.append(_becomes(layer, type(layer)))
        layer.__class__ = _ROUNDED[type(layer)]

    def detach() -> None:
        for step in undo:
            step()

    return detach


def _rounds_input(ranges: Ranges, number: int) -> Callable[[nn.Module, Any], Any]:
    return lambda _, given: (ranges.at(given[0], number), *given[1:])


def _becomes(layer: nn.Module, kind: type[nn.Module]) -> Callable[[], None]:
    return lambda: setattr(layer, "__class__", kind)
