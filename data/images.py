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

    Whole batches are taken at once, unless the transform has to see each image by itself.
    """

    transforms_in_batches = True

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

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.targets[index])

    def batch(self, indices: Sequence[int]) -> tuple[Any, Tensor] | None:
        """Return a whole batch at once, or None where the transform takes single images."""
        if self.transform is not None and not acts_on_batches(self.transform):
            return None
        rows = torch.tensor(indices)
        images = self.images.index_select(0, rows)  # of bytes, many times as fast as images[rows]
        if self.transform is not None:
            images = self.transform(images)
        return images, self.targets.index_select(0, rows)


def resized(images: Tensor, size: int | None) -> Tensor:
    """Return uint8 images (n, C, H, W) at size x size, bilinear: once, not at every access."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    chunks = [
        F.interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True)
        for chunk in torch.split(images, 1024)
    ]
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks])
