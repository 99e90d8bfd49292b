"""Brightness, contrast and saturation of batches of images."""

import torch
from torch import Tensor

from data.images import column, means

_FINE = 2**24  # steps in which the brightness of floating images is averaged


def jittered(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change images (n, C, H, W) by factors (n, 3), each image in its own order (n, 3).

    0: brightness, 1: contrast, 2: saturation.
    """
    whole = not images.is_floating_point()
    result = images.to(torch.float32) if whole else images
    for turn in order.unbind(1):
        factor = factors.gather(1, turn[:, None])[:, :, None, None]
        towards = _towards(result, column(turn, result), whole)
        result = result * factor + towards * (1 - factor)
        result = result.clamp(0, 255 if whole else 1)
        result = result.floor() if whole else result
    return result.to(images.dtype)


def _towards(images: Tensor, turn: Tensor, whole: bool) -> Tensor:
    """Return the image at factor 0: black, the mean grey, or each pixel's grey."""
    grey = _grey(images)
    grey = grey.floor() if whole and images.shape[1] == 3 else grey
    mean = means(grey, 1 if whole else _FINE)
    still = grey if images.shape[1] == 3 else images
    return torch.where(turn == 0, 0.0, torch.where(turn == 1, mean, still))


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return red * 0.2989 + green * 0.587 + blue * 0.114
