"""Noise beside each image, for generators."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regimen.data.transforms import Transform, on_inputs


@dataclass(eq=False)
class WithNoise:
    """Pair each image of a labelled data set with noise [latent_dim] from a normal distribution.

    `torch.randn` draws from the generator that the loader keys by (seed, epoch, index, occurrence)
    for each sample. So an update of a GAN has the same noise however its batch is split.
    """

    transforms_in_batches = True

    dataset: Any
    latent_dim: int
    transform: Transform = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image = on_inputs(self.transform, self.dataset[index][0])
        return image, torch.randn(self.latent_dim)
