"""Digits, each with the step of the diffusion and the noise that it is trained with."""

import torch
from torch import Tensor

from regimen.data.sources import Digits
from regimen.data.splits import Split


class DigitsWithNoise:
    """Samples are an image (1, H, W) from -1 to 1, a step in [0, steps), and noise (1, H, W).

    The loader keys torch's generator by the sample: so an update has the same draws however it is
    split, and each validation has those of the one before.
    """

    def __init__(self, split: Split, image_size: int = 8, steps: int = 200) -> None:
        self.images = Digits(split, image_size).inputs / 127.5 - 1
        self.image_size = image_size
        self.steps = steps

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image = self.images[index]
        return image, torch.randint(self.steps, ()), torch.randn(image.shape)
