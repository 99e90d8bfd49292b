"""Residual networks (He et al., 2015, arXiv:1512.03385), for small and for large images.

Modules have the names of torchvision's, so that its ImageNet weights can be loaded; each activation
is a separate module.
"""

from typing import Literal

from torch import Tensor, nn

from regimen.models.layers import height_width, make_activation


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)
        self.act2 = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, width, H / stride, W / stride)."""
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.act2(out + self.downsample(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the 3x3 convolution has the stride."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, activation: str) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = make_activation(activation)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride)
        self.act3 = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, 4 width, H / stride, W / stride)."""
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.act2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.act3(out + self.downsample(x))  # type: ignore[no-any-return]


# The type of the blocks and their number in each stage (Table 1 of the paper).
DEPTHS: dict[int, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, global average pooling and a linear head.

    stem: "cifar" keeps the image size, "imagenet" divides it by 4; "auto" is "imagenet" for an
    `image_size` of more than 64 pixels a side.
    zero_init_residual: set the weight of the last BatchNorm of each block to zero, so that the
    block starts as its shortcut.
    """

    def __init__(
        self,
        depth: Literal[18, 34, 50],
        num_classes: int,
        in_channels: int = 3,
        stem: Literal["cifar", "imagenet", "auto"] = "cifar",
        activation: str = "relu",
        zero_init_residual: bool = False,
        image_size: int | list[int] | None = None,
    ) -> None:
        super().__init__()
        if stem == "auto":
            stem = "imagenet" if max(height_width(image_size or 0)) > 64 else "cifar"
        block, counts = DEPTHS[depth]
        if stem == "cifar":
            self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.act1 = make_activation(activation)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, padding=1)

        channels = 64
        width = 64
        stride = 1  # of a stage's first block
        stages = []
        for blocks in counts:
            stage = nn.Sequential()
            for _ in range(blocks):
                stage.append(block(channels, width, stride, activation))
                channels = width * block.expansion
                stride = 1
            stages.append(stage)
            width *= 2
            stride = 2
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, block):
                last = module.bn2 if isinstance(module, BasicBlock) else module.bn3
                nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))  # type: ignore[no-any-return]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))
