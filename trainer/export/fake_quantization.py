"""Fake quantization: a network in floats that rounds as an 8-bit integer network does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.export.places import LAYERS, Places

LEARNT = "fake_quantization"  # the key of ranges in the state of a callback
LEVELS = 255  # of activations, as unsigned integers of 8 bits
LARGEST = 127  # of weights, as signed ones
_SMALLEST = 1e-12  # a scale: a channel may be all zeros


class Ranges:
    """The range of the values at each place, to which they are rounded.

    Values are `low` to `high`, [places], and always include zero.
    """

    def __init__(self, places: Places, device: torch.device) -> None:
        self.places = places
        count = len(places.names)
        self.low, self.high = (torch.zeros(count, device=device) for _ in range(2))
        self._seen_low, self._seen_high = (torch.zeros(count, device=device) for _ in range(2))
        self.known = False
        self.observes: Callable[[], bool] = torch.is_grad_enabled  # training, not evaluation
        self.rounds = True  # where the ranges are known

    def at(self, x: Tensor, place: int) -> Tensor:
        """Record the values at a place, and round them if its range is known."""
        if self.observes():
            with torch.no_grad():
                low, high = x.detach().aminmax()
                self._seen_low[place] = torch.minimum(self._seen_low[place], low)
                self._seen_high[place] = torch.maximum(self._seen_high[place], high)
        if not (self.known and self.rounds):
            return x
        scale, zero = scale_and_zero(self.low[place], self.high[place])
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, LEVELS)
        return rounded.to(x.dtype)

    @property
    def seen(self) -> Tensor:
        """The smallest and the largest values since `forget`, [2, places]."""
        return torch.stack([self._seen_low, self._seen_high])

    def forget(self) -> None:
        """Reset the observed values."""
        self._seen_low.zero_()
        self._seen_high.zero_()

    def follow(self, seen: Tensor, momentum: float) -> None:
        """Move the ranges towards `seen` by `1 - momentum`; the first call sets them."""
        weight = 1 - momentum if self.known else 1.0
        self.low.lerp_(seen[0], weight)
        self.high.lerp_(seen[1], weight)
        self.known = True

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by the names of their places."""
        return {
            "places": list(self.places.names),
            "low": self.low,
            "high": self.high,
            "known": self.known,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ranges. Raises ValueError for those of another network."""
        if list(state["places"]) != list(self.places.names):
            raise ValueError("the ranges are of a network with other layers")
        self.low.copy_(state["low"])
        self.high.copy_(state["high"])
        self.known = bool(state["known"])


def scale_and_zero(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step size and the integer for zero, without waiting for the device."""
    scale = ((high - low) / LEVELS).clamp_min(_SMALLEST)
    zero = (-low / scale).round().clamp(0, LEVELS)
    return scale, zero.to(torch.int32)


def weight_scale(weight: Tensor) -> Tensor:
    """Return the step size of each output channel, [channels]."""
    return (weight.detach().flatten(1).abs().amax(1) / LARGEST).float().clamp_min(_SMALLEST)


class _Rounding(torch.autograd.Function):
    """Round weights to a grid; gradients pass unchanged.

    Half the cost of torch.fake_quantize_per_channel_affine, which also clips: nothing lies outside
    of a grid that reaches to the largest weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight_scale(weight).view(-1, *[1] * (weight.ndim - 1))
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


_ROUNDED: Mapping[type[nn.Module], type[nn.Module]] = dict(
    zip(LAYERS, (_Conv1d, _Conv2d, _Conv3d, _Linear), strict=True)
)


def attach(model: nn.Module, ranges: Ranges) -> Callable[[], None]:
    """Make a network round its weights and the values at its places; return the undo function.

    Names and values of its parameters stay: only the classes of the layers change, to ones that
    round their weights.
    """
    undo: list[Callable[[], None]] = [
        _observed(model, name, number, ranges) for number, name in enumerate(ranges.places.names)
    ]
    for layer in ranges.places.layers:
        module = model.get_submodule(layer.name)
        kind = type(module)
        module.__class__ = _ROUNDED[kind]
        undo.append(lambda module=module, kind=kind: setattr(module, "__class__", kind))  # type: ignore[misc]

    def detach() -> None:
        for step in undo:
            step()

    return detach


def _observed(model: nn.Module, name: str, number: int, ranges: Ranges) -> Callable[[], None]:
    side, _, path = name.partition(":")
    module = model.get_submodule(path)
    if side == "input":
        before = module.register_forward_pre_hook(lambda _, given: ranges.at(given[0], number))
        return before.remove
    after = module.register_forward_hook(lambda _, given, value: ranges.at(value, number))
    return after.remove
