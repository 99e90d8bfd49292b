"""A generator and a discriminator in one module (Radford et al., 2015, arXiv:1511.06434).

Both are called through `forward`, so that wrappers such as DDP see every call.
"""

import math
from collections import OrderedDict
from typing import Final, Literal

from torch import Tensor, nn

from models.errors import NetworkError

_GROUPS: Final = 8  # of channels, in the generator


class Generator(nn.Module):
    """Map noise to images in [-1, 1]: from a quarter of their size, upsampled twice."""

    def __init__(
        self, latent_dim: int, channels: int, image_size: int, width: int, norm: str
    ) -> None:
        super().__init__()
        self.seed = nn.Linear(latent_dim, 2 * width * (image_size // 4) ** 2)
        self.grid = nn.Unflatten(1, (2 * width, image_size // 4, image_size // 4))
        self.layers = nn.Sequential(
            OrderedDict(
                bn0=_norm(norm, 2 * width),
                act0=nn.ReLU(),
                up1=nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
                bn1=_norm(norm, width),
                act1=nn.ReLU(),
                up2=nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
                act2=nn.Tanh(),
            )
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Map (N, latent_dim) to (N, channels, image_size, image_size)."""
        if noise.shape[1:] != (self.seed.in_features,):
            raise NetworkError(
                f"the noise has shape {list(noise.shape[1:])} per sample, but model.latent_dim "
                f"is {self.seed.in_features}"
            )
        return self.layers(self.grid(self.seed(noise)))  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    """Map images to one logit each, high for real images; without BatchNorm."""

    def __init__(self, channels: int, image_size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            OrderedDict(
                down1=nn.Conv2d(channels, width, 4, stride=2, padding=1),
                act1=nn.LeakyReLU(0.2),
                down2=nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
                act2=nn.LeakyReLU(0.2),
                flatten=nn.Flatten(),
                head=nn.Linear(2 * width * (image_size // 4) ** 2, 1),
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, channels, image_size, image_size) to (N, 1)."""
        return self.layers(images)  # type: ignore[no-any-return]


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)


class GAN(nn.Module):
    """Generator and discriminator; parameters are named `generator.*` and `discriminator.*`.

    `norm`: the normalization of the generator. With `group` the samples are independent, so that
    training does not depend on how an update is split; `batch`, as in the paper, does.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 16,
        latent_dim: int = 32,
        width: int = 32,
        norm: Literal["group", "batch"] = "group",
    ) -> None:
        super().__init__()
        if image_size % 4:
            raise NetworkError(f"model.image_size={image_size} is not a multiple of 4")
        if norm not in ("group", "batch"):
            raise NetworkError(f"model.norm={norm!r} is neither group nor batch")
        self.latent_dim = latent_dim
        self.generator = Generator(latent_dim, in_channels, image_size, width, norm)
        self.discriminator = Discriminator(in_channels, image_size, width)

    def forward(
        self, x: Tensor, part: Literal["generator", "discriminator"] = "discriminator"
    ) -> Tensor:
        """Pass images to the discriminator, or noise to the generator."""
        return self.generator(x) if part == "generator" else self.discriminator(x)  # type: ignore[no-any-return]
