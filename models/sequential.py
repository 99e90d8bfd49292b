"""A network written down as a list of layers, traced so that a misfit names its layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.errors import ModelError


def from_layers(
    layers: Sequence[nn.Module] | Mapping[str, nn.Module | None],
    input_shape: Sequence[int],
    num_classes: int | None = None,
) -> nn.Sequential:
    """Chain `layers` and try them on zeros of `input_shape` (one sample, without its batch).

    Layers given as a mapping keep their names; one that is None is left out. Lazy layers take
    their sizes from the trace. `num_classes` adds a linear layer `head` of that many outputs.
    """
    named = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
    model = nn.Sequential()
    for name, layer in named.items():
        if layer is not None:
            model.add_module(str(name), layer)
    if not len(model):
        raise ModelError("model.layers is empty")
    if num_classes is not None:
        model.add_module("head", nn.LazyLinear(num_classes))
    trace(model, input_shape)
    return model


def trace(model: nn.Sequential, input_shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return each layer's name and output shape (without the batch), for one sample.

    Runs in evaluation mode: dropout draws nothing and BatchNorm's statistics stay.
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
        raise ModelError(
            f"model.layers.{name} ({layer}) does not take the shape {_text(shapes[-1][1])} "
            f"that reaches it: {reason} [{path}]"
        ) from error
    if not isinstance(out, Tensor):
        raise ModelError(
            f"model.layers.{name} ({layer}) returns a {type(out).__name__}; "
            "layers in a list pass on one tensor"
        )
    return out


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
