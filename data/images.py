"""Images in memory: a data set of them, resized once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from data.errors import DataError
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

    def input_form(self) -> dict[str, Any]:
        """Return the form that the transforms expect of a picture."""
        return picture_form(self.images)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all samples as one batch, before the transforms."""
        return self.images, self.targets

    def batch(self, indices: Sequence[int]) -> tuple[Any, Tensor] | None:
        """Return a whole batch at once, or None if the transform takes single images."""
        if self.transform is not None and not acts_on_batches(self.transform):
            return None
        rows = torch.from_numpy(np.array(indices))  # a quarter of the time of torch.tensor
        images = self.images.index_select(0, rows)  # of bytes, many times as fast as images[rows]
        if self.transform is not None:
            images = self.transform(images)
        return images, self.targets.index_select(0, rows)


def picture_form(images: Tensor) -> dict[str, Any]:
    """Return the form of pictures of one size (n, C, H, W): channels, height and width."""
    channels, height, width = images.shape[1:]
    if images.dtype != torch.uint8 or channels not in (1, 3):
        return {"kind": "array"}
    return {"kind": "picture", "channels": channels, "size": [height, width]}


def resized(images: Tensor, size: int | Sequence[int] | None) -> Tensor:
    """Return uint8 images (n, C, H, W) at `size` (a side, or height and width), bilinear.

    Data sets in memory do it once, not at every access.
    """
    shape = [size, size] if isinstance(size, int) else size
    if shape is None or list(images.shape[-2:]) == list(shape):
        return images
    if min(shape) < 1:
        raise DataError(f"image_size={size}: give a side of at least one pixel")
    chunks = [
        interpolate(chunk.float(), list(shape), mode="bilinear", antialias=True)
        for chunk in torch.split(images, 1024)
    ]
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks])
