"""The loss of denoising diffusion, and how images are sampled."""

from typing import Any

import torch
from torch import Tensor, nn

from regimen import StepOutput, Task


class Diffusion(Task):
    """Train a network to tell the noise in an image, by the simple loss of Ho et al. (2020).

    Batches are `(images, step, noise)`. The variance of the noise that a step adds grows linearly,
    as in the paper for `steps` of 1000; with fewer steps each adds as much more.
    """

    def __init__(self, steps: int) -> None:
        betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * (1000 / steps)
        kept = (1 - betas).cumprod(0)  # the part of the image's variance that is left
        self.steps = steps
        # These are moved to the device of the batches with the task.
        self.betas = betas
        self.signal = kept.sqrt()
        self.noise = (1 - kept).sqrt()

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the mean squared error of the noise, for each sample."""
        images, step, noise = batch
        signal = self.signal[step].to(images).view(-1, 1, 1, 1)
        deviation = self.noise[step].to(images).view(-1, 1, 1, 1)
        noisy = signal * images + deviation * noise
        error = model(noisy, step) - noise
        return StepOutput(error.square().flatten(1).mean(1))

    def sample(self, model: nn.Module, count: int, side: int, seed: int) -> Tensor:
        """Return images (count, 1, side, side), the same for the same weights and seed."""
        # On the host, so that the noise is the same for each device.
        generator = torch.Generator().manual_seed(seed)
        shape = (count, 1, side, side)
        images = torch.randn(shape, generator=generator).to(next(model.parameters()))
        for step in reversed(range(self.steps)):
            beta = self.betas[step]
            steps = torch.full((count,), step, device=images.device)
            told = model(images, steps)
            images = (images - beta / self.noise[step] * told) / (1 - beta).sqrt()
            if step:
                images = images + beta.sqrt() * torch.randn(shape, generator=generator).to(images)
        return images.clamp(-1, 1)

    def prediction_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the noise that the network tells in noisy images, at their steps."""
        images, step, *_ = batch
        noise: Tensor = model(images, step)
        return noise
