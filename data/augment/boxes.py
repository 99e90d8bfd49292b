"""Random boxes of images: draw them, and overwrite what is in them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.images import within
from data.keys import Draws
from data.transforms import Constants

Sides = npt.NDArray[np.int64]
Fill = float | Constants
TRIES = 10  # boxes that torchvision draws at most


def boxes(
    draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Sides, Sides]:
    """Draw ten boxes for each image (10, n), in numpy: its calls take half as long as torch's."""
    areas = (draws.uniform(scale[0], scale[1], each=TRIES) * area).numpy().T
    # numpy's exponential has other last bits.
    ratios = draws.uniform(math.log(ratio[0]), math.log(ratio[1]), each=TRIES).exp().numpy().T
    tall, wide = np.sqrt(areas * ratios), np.sqrt(areas / ratios)
    return np.rint(tall).astype(np.int64), np.rint(wide).astype(np.int64)


def first(fits: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
    """Return where the first box that fits is for each image, and whether one does (n)."""
    return (fits.argmax(0), np.arange(fits.shape[1])), fits.any(0)


def fill_in_place(images: Tensor, fill: Fill, sides: Sequence[Tensor]) -> None:
    """Write only the boxes (top, left, height, width; each (n,)) of images in a CPU's memory.

    Nothing is written where the height is 0.
    """
    written = fill.beside(images, images.dtype).numpy() if isinstance(fill, Constants) else fill
    numbers = zip(*(side.tolist() for side in sides), strict=True)
    for image, (top, left, tall, wide) in zip(images.numpy(), numbers, strict=True):
        if tall:
            image[:, top : top + tall, left : left + wide] = written


def filled(images: Tensor, fill: Fill, sides: Sequence[Tensor]) -> Tensor:
    """Return images with boxes overwritten, on any device: slices by tensors wait for a GPU."""
    top, left, tall, wide = sides
    rows = within(top, tall, images.shape[-2])
    columns = within(left, wide, images.shape[-1])
    box = (rows[:, :, None] & columns[:, None, :])[:, None]
    if isinstance(fill, Constants):
        return torch.where(box, fill.beside(images, images.dtype), images)
    return images.masked_fill(box, fill)
