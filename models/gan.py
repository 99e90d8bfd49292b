"""A generator and a discriminator in one module (Radford et al., 2015, arXiv:1511.06434)."""

import math
from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn

from regimen.models.layers import NetworkError


class GAN(nn.Module):
    """Generator and discriminator; parameters are named `generator.*` and `discriminator.*`.

    The generator maps noise to images in [-1, 1], from a quarter of their size, upsampled twice.
    The discriminator maps images to one logit each, high for real ones, without BatchNorm. Both are
    called through `forward`, so that wrappers such as DDP see every call.

    norm: the normalization of the generator. With "group" the samples are independent, so that
    training does not depend on how an update is split. With "batch", as in the paper, it does.
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

        def make_norm(channels: int) -> nn.Module:
            if norm == "batch":
                return nn.BatchNorm2d(channels)
            return nn.GroupNorm(math.gcd(8, channels), channels)

        side = image_size // 4
        self.latent_dim = latent_dim
        self.generator = nn.Sequential(
            OrderedDict(
                seed=nn.Linear(latent_dim, 2 * width * side**2),
                grid=nn.Unflatten(1, (2 * width, side, side)),
                bn0=make_norm(2 * width),
                act0=nn.ReLU(),
                up1=nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
                bn1=make_norm(width),
                act1=nn.ReLU(),
                up2=nn.ConvTranspose2d(width, in_channels, 4, stride=2, padding=1),
                act2=nn.Tanh(),
            )
        )
        self.discriminator = nn.Sequential(
            OrderedDict(
                down1=nn.Conv2d(in_channels, width, 4, stride=2, padding=1),
                act1=nn.LeakyReLU(0.2),
                down2=nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
                act2=nn.LeakyReLU(0.2),
                flatten=nn.Flatten(),
                head=nn.Linear(2 * width * side**2, 1),
            )
        )

    def forward(
        self, x: Tensor, part: Literal["generator", "discriminator"] = "discriminator"
    ) -> Tensor:
        """Pass images to the discriminator, or noise (N, latent_dim) to the generator."""
        if part == "discriminator":
            return self.discriminator(x)  # type: ignore[no-any-return]
        if x.shape[1:] != (self.latent_dim,):
            raise NetworkError(
                f"the noise has shape {list(x.shape[1:])} per sample, but model.latent_dim "
                f"is {self.latent_dim}"
            )
        return self.generator(x)  # type: ignore[no-any-return]
