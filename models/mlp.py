"""A multi-layer perceptron without BatchNorm and dropout."""

from collections.abc import Sequence

from torch import Tensor, nn

from regimen.models.layers import height_width, make_activation


class MLP(nn.Module):
    """Flatten the input, apply linear layers with an activation behind each, and a linear head.

    `in_features` replaces `in_channels * height * width` for inputs that are not images.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 16,
        hidden: Sequence[int] = (256, 128),
        activation: str = "relu",
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        height, width = height_width(image_size)
        features = in_features or in_channels * height * width
        self.flatten = nn.Flatten()
        self.layers = nn.Sequential()
        for i, size in enumerate(hidden):
            self.layers.add_module(f"linear{i}", nn.Linear(features, size))
            self.layers.add_module(f"activation{i}", make_activation(activation))
            features = size
        self.head = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, ...) to (N, num_classes)."""
        return self.head(self.layers(self.flatten(x)))  # type: ignore[no-any-return]
