"""A small, quickly trained network for CIFAR-sized images, after Jordan's airbench (2024)."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from regimen.models.layers import make_activation

_EPSILON = 1e-12  # added to a variance


class Airbench(nn.Module):
    """A frozen whitening layer, three groups of two convolutions, maxima and a linear head.

    The first layer has a filter and its negative for each principal component of its `kernel` x
    `kernel` patches: `callbacks.whitening` sets them from the data, which are random till then.
    BatchNorm has no scale. The logits are divided by the number of features.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        kernel: int = 2,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        filters = 2 * in_channels * kernel**2
        self.whiten = nn.Conv2d(in_channels, filters, kernel)
        self.whiten.weight.requires_grad_(False)
        self.act = make_activation(activation)
        channels = [filters, *widths]
        groups = [_group(a, b, activation) for a, b in zip(channels, widths, strict=False)]
        self.groups = nn.Sequential(*groups)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(channels[-1], num_classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W), of 12 pixels or more, to logits (N, num_classes)."""
        x = self.groups(self.act(self.whiten(x)))
        x = max_pool2d(x, x.shape[-2:])  # AdaptiveMaxPool2d's gradients are not exact on a GPU
        return self.head(self.flatten(x)) / self.head.in_features  # type: ignore[no-any-return]


def _group(in_channels: int, width: int, activation: str) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=_convolution(in_channels, width),
            pool=nn.MaxPool2d(2),
            norm1=_norm(width),
            act1=make_activation(activation),
            conv2=_convolution(width, width),
            norm2=_norm(width),
            act2=make_activation(activation),
        )
    )


def _convolution(in_channels: int, width: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first filters hand on their channel."""
    layer = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(layer.weight[:in_channels])
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    """Return BatchNorm with a bias alone, whose statistics follow the last few updates."""
    layer = nn.BatchNorm2d(width, eps=_EPSILON, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer
