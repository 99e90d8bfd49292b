"""A network from a list of layers; an error of shapes names the layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.errors import NetworkError


def from_layers(
    layers: Sequence[nn.Module] | Mapping[str, nn.Module | None],
    input_shape: Sequence[int],
    num_classes: int | None = None,
) -> nn.Sequential:
    """Chain `layers` and call them on zeros of `input_shape` (one sample without batch dimension).

    Layers of a mapping keep their names; None is dropped. Lazy layers get their sizes from this
    call. `num_classes` adds a linear layer `head` with that many outputs.
    """
    named = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
    model = nn.Sequential()
    for name, layer in named.items():
        if layer is not None:
            model.add_module(str(name), layer)
    if not len(model):
        raise NetworkError("model.layers is empty")
    if num_classes is not None:
        model.add_module("head", nn.LazyLinear(num_classes))
    trace(model, input_shape)
    return model


def trace(model: nn.Sequential, input_shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return each layer's name and output shape (without the batch), for one sample.

    Runs in evaluation mode: no dropout, and no change of BatchNorm's statistics.
    """
    x = torch.zeros(1, *input_shape)
    shapes = [("input", tuple(x.shape[1:]))]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for name, layer in model.named_children():
            x = _apply(name, layer, x, shapes)
            shapes.append((name, tuple(x.shape[1:])))
    finally:
        for module, training in modes:
            module.training = training
    return shapes


@torch.no_grad()
def _apply(
    name: str, layer: nn.Module, x: Tensor, shapes: list[tuple[str, tuple[int, ...]]]
) -> Tensor:
    try:
        out = layer(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        path = " -> ".join(f"{given} {_text(shape)}" for given, shape in shapes)
        reason = str(error).strip().splitlines()[0]
        raise NetworkError(
            f"model.layers.{name} ({layer}) does not accept its input of shape "
            f"{_text(shapes[-1][1])}: {reason} [{path}]"
        ) from error
    if not isinstance(out, Tensor):
        raise NetworkError(
            f"model.layers.{name} ({layer}) returns a {type(out).__name__}; "
            "layers in a list must return one tensor"
        )
    return out


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
