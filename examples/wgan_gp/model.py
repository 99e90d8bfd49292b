"""Critic and generator of a Wasserstein GAN, as multi-layer perceptrons."""

from typing import Literal

from torch import Tensor, nn


class CriticAndGenerator(nn.Module):
    """Two networks whose parameters are named `critic.*` and `generator.*`.

    The critic has no BatchNorm: the penalty is on its gradient at each sample by itself. The losses
    do not depend on a bias of its head, nor, with ReLU, on that of a unit which is active for all
    images: such a gradient is rounding errors, of which Adam would make steps. So the head has no
    bias, and the units are smooth.
    """

    def __init__(self, image_size: int = 8, latent_dim: int = 16, hidden: int = 256) -> None:
        super().__init__()
        pixels = image_size**2
        self.critic = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1, bias=False),
            nn.Flatten(0),
        )
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, pixels),
            nn.Tanh(),
            nn.Unflatten(1, (1, image_size, image_size)),
        )

    def forward(self, x: Tensor, part: Literal["critic", "generator"]) -> Tensor:
        """Return scores (N,) of images (N, 1, H, W), or images from noise (N, latent_dim)."""
        network: nn.Module = self.critic if part == "critic" else self.generator
        output: Tensor = network(x)
        return output
