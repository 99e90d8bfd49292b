"""Digits, each with what an update draws for it."""

import torch
from torch import Tensor

from regimen.data.sources import Digits
from regimen.data.splits import Split


class DigitsWithDraws:
    """Samples are an image (1, H, W) from -1 to 1, noise (latent_dim,), and a share in [0, 1).

    The loader keys torch's generator by the sample: so an update has the same draws however it is
    split.
    """

    def __init__(self, split: Split, image_size: int = 8, latent_dim: int = 16) -> None:
        self.image_size = image_size
        self.images = Digits(split, image_size).inputs / 127.5 - 1
        self.latent_dim = latent_dim

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[index], torch.randn(self.latent_dim), torch.rand(1, 1, 1)
