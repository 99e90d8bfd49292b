"""Two views of each digit, each with its own shift, zoom, turn and brightness."""

import torch
from torch import Tensor
from torchvision.transforms import v2

from regimen.data.sources import Digits
from regimen.data.splits import Split


class TwoViews:
    """Samples (view, view) of scikit-learn's digits, without labels; each [1, size, size].

    The views are drawn from torch's generator, which the loader sets anew for each sample, so that
    they depend on the seed, the epoch and the sample alone.
    """

    def __init__(self, split: Split, image_size: int = 16, split_seed: int = 0) -> None:
        self._images = Digits(split, image_size, split_seed).inputs
        self._turn = v2.RandomAffine(degrees=15, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=10)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._view(index), self._view(index)

    def _view(self, index: int) -> Tensor:
        image: Tensor = self._turn(self._images[index])
        brightness = 0.6 + 0.8 * torch.rand(())
        return (brightness * image.float() / 255 - 0.305) / 0.319
