"""Images in memory: a data set of them; crops, flips and resampling of batches.

All is computed element by element, so that an image is bit-equal in any batch: sums and matrix
products may round differently in a batch of another size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.transforms import acts_on_batches

Transform = Callable[[Any], Any]
Affine = tuple[Tensor, Tensor, Tensor]

_LARGE = 32768  # bytes of an image, above which memory for a whole batch costs more than a loop


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
    chunks = [
        F.interpolate(chunk.float(), list(shape), mode="bilinear", antialias=True)
        for chunk in torch.split(images, 1024)
    ]
    return torch.cat([chunk.round().clamp(0, 255).byte() for chunk in chunks])


def column(values: Tensor, images: Tensor) -> Tensor:
    """Return values (n,) in a shape that broadcasts with images (n, ...)."""
    return values.view(-1, *[1] * (images.ndim - 1))


def chosen(which: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the images (n, ...) of `one` where `which` (n,) is true, and of `other` elsewhere.

    Bytes are viewed as int64: `torch.where` takes as long for an element of 1 byte as of 8.
    """
    fits = one.element_size() == 1 and one.shape[-1] % 8 == 0
    if fits and one.is_contiguous() and other.is_contiguous():
        words = torch.where(column(which, one), one.view(torch.int64), other.view(torch.int64))
        return words.view(one.dtype)
    return torch.where(column(which, one), one, other)


def flipped(images: Tensor, which: Tensor, axis: int) -> Tensor:
    """Flip the images (n, ...) where `which` (n,) is true, along an axis."""
    if images.device.type != "cpu" or images[0].nbytes < _LARGE:
        return chosen(which, images.flip(axis), images)
    result = images.clone()
    for row in which.nonzero()[:, 0].tolist():
        result[row] = images[row].flip(axis)
    return result


def flip_in_place(images: Tensor, which: Tensor, axis: int) -> None:
    """Flip the images (n, ...) where `which` (n,) is true, on a CPU, in their own memory.

    Rows are written by numpy: torch takes half as long again for bytes.
    """
    rows = which.nonzero()[:, 0]
    images.numpy()[rows.numpy()] = images.index_select(0, rows).flip(axis).numpy()


def windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop each image to a window (n, C, *size), copying whole rows."""
    images = images.contiguous()
    samples, channels, height, width = images.shape
    planes = torch.arange(channels, device=images.device) * (height * width)
    within_plane = torch.arange(size[0], device=images.device) * width
    each = torch.arange(samples, device=images.device) * (channels * height * width)
    corners = each + top * width + left
    starts = corners[:, None] + (planes[:, None] + within_plane).view(-1)
    every = images.view(-1).as_strided((images.numel() - size[1] + 1, size[1]), (1, 1))
    return every.index_select(0, starts.view(-1)).view(samples, channels, *size)


def within(first: Tensor, length: Tensor, side: int) -> Tensor:
    """Return a mask (n, side) of the positions within each interval."""
    positions = torch.arange(side, device=first.device)
    return (positions >= first[:, None]) & (positions < (first + length)[:, None])


def sampled(
    images: Tensor, x: Affine, y: Affine, size: tuple[int, int], mode: str, outside: str
) -> Tensor:
    """Sample images at affine coordinates; integer images are rounded.

    x, y: (a, b, c), each (n,): the output pixel at (u, v) is read at a u + b v + c. Coordinates run
    from -1 to 1 over the image. mode, outside: `mode` and `padding_mode` of `grid_sample`.
    """
    values = images if images.is_floating_point() else images.to(torch.float32)
    v, u = (_centres(side, values) for side in size)
    grid = torch.stack([_affine(x, u, v), _affine(y, u, v)], -1)
    read = F.grid_sample(values, grid.to(values.dtype), mode, outside, align_corners=False)
    return read if images.is_floating_point() else read.round_().to(images.dtype)


def _centres(side: int, like: Tensor) -> Tensor:
    """Return the coordinates of the centres of `side` pixels."""
    return torch.linspace(1 / side - 1, 1 - 1 / side, side, device=like.device)


def _affine(function: Affine, u: Tensor, v: Tensor) -> Tensor:
    a, b, c = (number[:, None, None] for number in function)
    return (a * u) + (b * v[:, None] + c)


def means(values: Tensor, unit: int) -> Tensor:
    """Return the mean of each image (n, 1, 1, 1): an exact sum of multiples of 1 / unit."""
    whole = (values * unit).round_().to(torch.int64).sum((-3, -2, -1), keepdim=True)
    return whole.to(values.dtype) / (unit * values[0].numel())
