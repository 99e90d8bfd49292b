"""Change the numbers of classes and of input channels of a network."""

import torch
from torch import Tensor, nn

from models.errors import NetworkError

Head = nn.Linear | nn.Conv2d


def find_head(model: nn.Module) -> str:
    """Return the name of the last linear or convolution layer: the classifier, in most networks."""
    heads: list[str] = [n for n, m in model.named_modules() if isinstance(m, Head)]
    if not heads:
        raise NetworkError(f"{type(model).__name__} has no linear or convolution layer for a head")
    return heads[-1]


def resize_head(model: nn.Module, num_classes: int, outputs: int | None = None) -> list[str]:
    """Replace every head by a new one with `num_classes` outputs; return their names.

    A head is a linear or convolution layer with `outputs` outputs (default: only the last layer).
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Head)}
    if outputs is None:
        heads = [find_head(model)]
    else:
        heads = [name for name, module in layers.items() if _outputs(module) == outputs]
    for name in heads:
        if _outputs(layers[name]) != num_classes:
            model.set_submodule(name, _like(layers[name], outputs=num_classes), strict=True)
    return heads


@torch.no_grad()
def resize_input(model: nn.Module, in_channels: int, trained: bool) -> None:
    """Replace the first convolution by one with `in_channels` input channels.

    `trained` weights compute the same result for grey images as before; untrained ones keep the
    distribution of the network's own initialization.
    """
    found = next(((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if found is None:
        raise NetworkError(f"{type(model).__name__} has no convolution for model.in_channels")
    name, old = found
    if old.in_channels == in_channels:
        return
    new = _like(old, inputs=in_channels)
    if trained:
        new.weight.copy_(adapt_channels(old.weight, in_channels))
    else:
        new.weight.copy_(old.weight[:, torch.arange(in_channels) % old.in_channels])
    if old.bias is not None and new.bias is not None:
        new.bias.copy_(old.bias)
    model.set_submodule(name, new, strict=True)


def adapt_channels(weight: Tensor, in_channels: int) -> Tensor:
    """Adapt a convolution's weight (out, in, h, w) to `in_channels` channels.

    Each new channel is the sum of the old ones divided by the new number of channels, so that the
    result is the same for images whose channels are equal.
    """
    total = weight.sum(dim=1, keepdim=True)
    return (total / in_channels).expand(-1, in_channels, -1, -1).contiguous()


def _outputs(module: Head) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def _like(module: Head, inputs: int | None = None, outputs: int | None = None) -> Head:
    bias = module.bias is not None
    if isinstance(module, nn.Linear):
        return nn.Linear(inputs or module.in_features, outputs or module.out_features, bias)
    if module.groups != 1:
        raise NetworkError("a grouped convolution cannot be resized")
    return nn.Conv2d(
        inputs or module.in_channels,
        outputs or module.out_channels,
        module.kernel_size,  # type: ignore[arg-type]
        module.stride,  # type: ignore[arg-type]
        module.padding,  # type: ignore[arg-type]
        module.dilation,  # type: ignore[arg-type]
        bias=bias,
        padding_mode=module.padding_mode,
    )
