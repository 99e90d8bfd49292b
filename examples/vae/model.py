"""Encoder and decoder of a variational autoencoder (Kingma and Welling, 2013, appendix C)."""

import torch
from torch import Tensor, nn


class VAE(nn.Module):
    """An encoder and a Bernoulli decoder with one hidden layer each; the prior is N(0, 1)."""

    def __init__(self, image_size: int = 8, latent_dim: int = 8, hidden: int = 256) -> None:
        super().__init__()
        pixels = image_size**2
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * latent_dim),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent_dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, pixels),
            nn.Unflatten(1, (1, image_size, image_size)),
        )

    def forward(self, noise: Tensor, images: Tensor | None = None) -> tuple[Tensor, ...]:
        """Encode images (N, 1, H, W) and decode them again; without images decode the noise.

        noise: (N, latent_dim), from N(0, 1). Returns logits of the pixels (N, 1, H, W), and of
        images also mean and log variance of the approximate posterior, (N, latent_dim) each.
        """
        if images is None:
            return (self.decoder(noise),)
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        latent = mean + torch.exp(0.5 * log_variance) * noise
        return self.decoder(latent), mean, log_variance
