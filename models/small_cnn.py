"""A small convolutional network that trains quickly."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from regimen.models.layers import make_activation


class SmallCNN(nn.Module):
    """Convolution, BatchNorm, activation and 2x2 pooling for each width, then a linear head."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        widths: Sequence[int] = (16, 32, 64),
        dropout: float = 0.0,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        channels = in_channels
        self.features = nn.Sequential()
        for width in widths:
            self.features.append(_stage(channels, width, activation))
            channels = width
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        x = self.flatten(self.pool(self.features(x)))
        return self.head(self.dropout(x))  # type: ignore[no-any-return]


def _stage(in_channels: int, width: int, activation: str) -> nn.Sequential:
    # ceil_mode keeps an odd last row, and accepts images smaller than 2**stages.
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(width),
            act=make_activation(activation),
            pool=nn.MaxPool2d(2, ceil_mode=True),
        )
    )
