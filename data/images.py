"""Images and targets held in memory as two tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.transforms import acts_on_batches

Transform = Callable[[Any], Any]


class ImageTensors:
    """A data set of images (n, C, H, W) and class numbers (n,).

    A transform without randomness that treats a batch as it treats an image (conversion,
    normalisation) is applied to whole batches; any other is called image by image.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        classes: Sequence[str],
        transform: Transform | None = None,
    ) -> None:
        self.images = images
        self.targets = targets
        self.classes = list(classes)
        self.transform = transform
        self._whole = transform is None or acts_on_batches(transform)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.targets[index])

    def batch(self, indices: Sequence[int]) -> tuple[Any, Tensor] | None:
        """Return a whole batch at once, or None where images need a random draw each."""
        if not self._whole:
            return None
        rows = torch.tensor(indices)
        images = self.images[rows]
        return images if self.transform is None else self.transform(images), self.targets[rows]


def resized(images: Tensor, size: int | None) -> Tensor:
    """Return uint8 images (n, C, H, W) at size x size, bilinear: once, not at every access."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    chunks = [
        F.interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True)
        for chunk in torch.split(images, 1024)
    ]
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks])
