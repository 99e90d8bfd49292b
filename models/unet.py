"""A small U-Net (Ronneberger et al., 2015, arXiv:1505.04597) for images of any size."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from regimen.models.layers import make_activation


class UNet(nn.Module):
    """Downsample `depth` times, then upsample and concatenate the features of each level."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        width: int = 16,
        depth: int = 2,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.stem = _double_conv(in_channels, width, activation)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        # The width doubles at each level, where the size of the features is halved.
        self.down = nn.ModuleList()
        for level in range(depth):
            finer = width * 2**level
            self.down.append(_double_conv(finer, 2 * finer, activation))
        self.up = nn.ModuleList()
        for level in reversed(range(depth)):
            finer = width * 2**level
            self.up.append(_double_conv(finer + 2 * finer, finer, activation))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits of each pixel (N, num_classes, H, W)."""
        levels = [self.stem(x)]
        for stage in self.down:
            levels.append(stage(self.pool(levels[-1])))
        out = levels.pop()
        for stage in self.up:
            skip = levels.pop()
            # Resized to the size of that level, so that odd sizes need no padding.
            upsampled = interpolate(out, size=skip.shape[-2:])
            out = stage(torch.cat([skip, upsampled], dim=1))
        return self.head(out)  # type: ignore[no-any-return]


def _double_conv(in_channels: int, width: int, activation: str) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(width),
            act1=make_activation(activation),
            conv2=nn.Conv2d(width, width, 3, padding=1, bias=False),
            bn2=nn.BatchNorm2d(width),
            act2=make_activation(activation),
        )
    )
