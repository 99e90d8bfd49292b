"""A network from a list of layers; an error of shapes names the layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regimen.models.layers import NetworkError


@torch.no_grad()
def from_layers(
    layers: Sequence[nn.Module] | Mapping[str, nn.Module | None],
    input_shape: Sequence[int],
    num_classes: int | None = None,
) -> nn.Sequential:
    """Chain `layers` and call them on zeros of `input_shape` (one sample without batch dimension).

    Layers of a mapping keep their names; None is dropped. Lazy layers get their sizes from this
    call. `num_classes` adds a linear layer `head` with that many outputs. Raises NetworkError,
    naming the layer that does not fit.
    """
    by_name = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
    model = nn.Sequential()
    for name, layer in by_name.items():
        if layer is not None:
            model.add_module(str(name), layer)
    if not len(model):
        raise NetworkError("model.layers is empty")
    if num_classes is not None:
        model.add_module("head", nn.LazyLinear(num_classes))
    model.eval()  # no dropout, and no change of BatchNorm's statistics
    x = torch.zeros(1, *input_shape)
    for name, layer in model.named_children():
        try:
            output = layer(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shape = "x".join(map(str, x.shape[1:])) or "scalar"
            reason = str(error).strip().splitlines()[0]
            raise NetworkError(
                f"model.layers.{name} ({layer}) does not accept its input of shape {shape}: "
                f"{reason}"
            ) from error
        if not isinstance(output, Tensor):
            raise NetworkError(
                f"model.layers.{name} ({layer}) returns a {type(output).__name__}; "
                "layers in a list must return one tensor"
            )
        x = output
    return model.train()
