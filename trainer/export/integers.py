"""A network with 8-bit integer weights and activations in ONNX's representation."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from trainer.export.fake_quantization import (
    LARGEST,
    LEVELS,
    Ranges,
    scale_and_zero,
    weight_scale,
)


class Rounded(nn.Module):
    """Round values to 8 bits: QuantizeLinear and DequantizeLinear in an exported graph."""

    scale: Tensor
    zero: Tensor

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        scale, zero = scale_and_zero(low, high)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero.to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of the same shape."""
        if not torch.compiler.is_exporting():
            zero = self.zero.to(torch.int32)
            return torch.fake_quantize_per_tensor_affine(x, self.scale, zero, 0, LEVELS)
        values = torch.onnx.ops.symbolic(
            "QuantizeLinear", (x, self.scale, self.zero), dtype=torch.uint8, shape=x.shape
        )
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (values, self.scale, self.zero), dtype=torch.float32, shape=x.shape
        )


class IntegerLayer(nn.Module):
    """A convolution or a linear layer with integer weights, a BatchNorm folded into them."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    bias_scale: Tensor

    def __init__(self, layer: Any, norm: Any, input_scale: Tensor) -> None:
        super().__init__()
        weight, bias = _folded(layer, norm)
        scale = weight_scale(weight)
        per_channel = scale.view(-1, *[1] * (weight.ndim - 1))
        integers = (weight / per_channel).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)
        self.register_buffer("bias_scale", scale * input_scale)
        largest = torch.iinfo(torch.int32).max
        if bias is not None:
            bias = (bias.double() / self.bias_scale.double()).round().clamp(-largest, largest)
            bias = bias.to(torch.int32)
        self.register_buffer("bias", bias)
        self._layer = [layer]  # not a submodule

    def __getattr__(self, name: str) -> Any:
        """Return what a network reads of the layer itself, such as `in_features`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_layer" not in self.__dict__:  # in `__init__`
                raise
            return getattr(self._layer[0], name)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the layer computes."""
        weight = _in_floats(self.weight, self.scale)
        bias = None if self.bias is None else _in_floats(self.bias, self.bias_scale)
        if isinstance(self._layer[0], nn.Linear):
            return F.linear(x, weight, bias)
        return self._layer[0]._conv_forward(x, weight, bias)  # type: ignore[no-any-return]


def integer_network(model: nn.Module, ranges: Ranges) -> nn.Module:
    """Return a copy of a network with integer layers, and values rounded at its places."""
    made = copy.deepcopy(model).eval()
    places = ranges.places
    for number, name in enumerate(places.names):
        _round_at(made, name, Rounded(ranges.low[number], ranges.high[number]))
    for layer in places.layers:
        scale, _ = scale_and_zero(ranges.low[layer.place], ranges.high[layer.place])
        norm = None if layer.norm is None else made.get_submodule(layer.norm)
        integers = IntegerLayer(made.get_submodule(layer.name), norm, scale)
        _keep_hooks(made.get_submodule(layer.name), integers)
        made.set_submodule(layer.name, integers)
        if layer.norm is not None:
            nothing = nn.Identity()
            _keep_hooks(made.get_submodule(layer.norm), nothing)
            made.set_submodule(layer.norm, nothing)
    return made


def _round_at(model: nn.Module, name: str, rounded: Rounded) -> None:
    side, _, path = name.partition(":")
    module = model.get_submodule(path)
    model.register_module(f"rounded_{name.replace(':', '_').replace('.', '_')}", rounded)
    if side == "input":
        module.register_forward_pre_hook(lambda _, given: rounded(given[0]))
    else:
        module.register_forward_hook(lambda _, given, value: rounded(value))


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    new._forward_hooks.update(old._forward_hooks)
    new._forward_pre_hooks.update(old._forward_pre_hooks)


def _folded(layer: Any, norm: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer.weight.detach().float(), layer.bias
    if norm is None:
        return weight, None if bias is None else bias.detach().float()
    fold = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    values = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    weight, bias = fold(weight, bias, *values)
    return weight.detach(), bias.detach()


def _in_floats(integers: Tensor, scale: Tensor) -> Tensor:
    if torch.compiler.is_exporting():
        zero = torch.zeros_like(integers.flatten(1)[:, 0] if integers.ndim > 1 else integers)
        return torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (integers, scale, zero),
            {"axis": 0},
            dtype=torch.float32,
            shape=integers.shape,
        )
    return integers * scale.view(-1, *[1] * (integers.ndim - 1))
