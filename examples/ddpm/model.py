"""A network that tells the noise in an image: residual layers in place of the paper's U-Net."""

import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual layer that is given an embedding of the step."""

    def __init__(self, hidden: int, embedded: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.step = nn.Linear(embedded, hidden)
        self.layers = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Return features (N, hidden)."""
        change: Tensor = self.layers(self.norm(x) + self.step(embedding))
        return x + change


class Denoiser(nn.Module):
    """Residual layers over all pixels, each given the step of the diffusion."""

    scale: Tensor

    def __init__(
        self, image_size: int = 8, hidden: int = 256, depth: int = 4, frequencies: int = 16
    ) -> None:
        super().__init__()
        pixels = image_size**2
        scale = torch.arange(frequencies) * (-math.log(10_000) / frequencies)
        self.register_buffer("scale", scale.exp(), persistent=False)
        self.entry = nn.Linear(pixels, hidden)
        self.blocks = nn.ModuleList([Block(hidden, 2 * frequencies) for _ in range(depth)])
        self.exit = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, pixels))

    def forward(self, images: Tensor, step: Tensor) -> Tensor:
        """Return the noise in images (N, 1, H, W), of that shape, at steps (N,)."""
        angles = step[:, None] * self.scale
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
        hidden = self.entry(images.flatten(1))
        for block in self.blocks:
            hidden = block(hidden, embedding)
        noise: Tensor = self.exit(hidden)
        return noise.view_as(images)
