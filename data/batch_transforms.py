"""Random transforms of image batches (n, C, H, W) with separate draws for each image.

`draw(draws, height, width)` returns one value (or row) for each image, on the CPU. Calling the
transform applies them, without waiting for the device. The result for an image is bit-equal in any
batch. The distributions are those of torchvision's transforms of the same names. Draws are new in
each epoch, unless a transform says `lasting = True`.
"""

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, constant_pad_nd
from torchvision.transforms.v2 import functional as F

from data.augment.boxes import TRIES, Sides, boxes, fill_in_place, filled, first
from data.augment.colour import jittered
from data.errors import DataError
from data.images import flip_in_place, flipped, sampled, windows
from data.keys import Draws
from data.transforms import Constants

Values = tuple[Tensor, ...]


class RandomHorizontalFlip:
    """Mirror each image with probability p; with `masks`, its target (n, ..., H, W) as well."""

    axis = -1
    overwrites = False

    def __init__(self, p: float = 0.5, masks: bool = False) -> None:
        self.p = p
        self.masks = masks

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image."""
        return (draws.uniform() < self.p,)

    def overwriting(self) -> "RandomHorizontalFlip":
        """Return this transform for images that nobody else holds: on a CPU they are changed."""
        other = copy.copy(self)
        other.overwrites = True
        return other

    def __call__(self, images: Tensor, flip: Tensor) -> Tensor:
        if self.overwrites and images.device.type == "cpu":
            flip_in_place(images, flip, self.axis)
            return images
        return flipped(images, flip, self.axis)

    def on_masks(self, masks: Tensor, flip: Tensor) -> Tensor:
        """Mirror targets."""
        return flipped(masks, flip, self.axis)


class AlternatingFlip(RandomHorizontalFlip):
    """Mirror a random half of the images in even epochs and the other half in odd ones.

    So each image is seen both ways in any two epochs (Jordan 2024).
    """

    lasting = True

    def __init__(self, masks: bool = False) -> None:
        super().__init__(0.5, masks)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image, once and for all, and turn it over in odd epochs."""
        return ((draws.uniform() < self.p) ^ bool(draws.epoch % 2),)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Turn each image upside down with probability p; with `masks`, its target as well."""

    axis = -2


class RandomCrop:
    """Cut a random size x size window from each image, padded first on all sides.

    With `masks`, the same window of the target (n, ..., H, W), padded with `mask_fill`.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int = 0,
        fill: float = 0.0,
        padding_mode: str = "constant",
        masks: bool = False,
        mask_fill: int = 0,
    ) -> None:
        self.size = _pair(size)
        self.padding = padding
        self.fill = fill
        self.padding_mode = padding_mode
        self.masks = masks
        self.mask_fill = mask_fill

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw the top left corners."""
        free = [
            side + 2 * self.padding - wanted + 1
            for side, wanted in zip((height, width), self.size, strict=True)
        ]
        if min(free) < 1:
            raise DataError(
                f"a crop of {self.size} does not fit into images of {height} x {width} "
                f"with padding {self.padding}"
            )
        return tuple(draws.integers(room) for room in free)

    def __call__(self, images: Tensor, top: Tensor, left: Tensor) -> Tensor:
        return self._windows(images, top, left, self.fill)

    def on_masks(self, masks: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Cut the same windows from targets."""
        flat = masks.reshape(len(masks), -1, *masks.shape[-2:])
        cut = self._windows(flat, top, left, self.mask_fill)
        return cut.reshape(*masks.shape[:-2], *self.size)

    def _windows(self, images: Tensor, top: Tensor, left: Tensor, fill: float) -> Tensor:
        if self.padding and self.padding_mode == "constant":
            images = constant_pad_nd(images, [self.padding] * 4, fill)
        elif self.padding:
            images = F.pad(images, [self.padding], padding_mode=self.padding_mode)
        return windows(images, top, left, self.size)


class RandomErasing:
    """Overwrite a random box of each image by `value` with probability p (Zhong et al. 2017).

    value: a number, or one for each channel, on the scale of the images at this point.
    """

    overwrites = False

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] = 0.0,
    ) -> None:
        self.p = p
        self.scale = scale
        self.ratio = ratio
        self.value = value if isinstance(value, int | float) else Constants(value, (-1, 1, 1))

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); height 0 where nothing is erased."""
        erased = draws.later(2 * TRIES) < self.p
        rows = np.zeros((4, len(draws)), np.int64)
        rows[:, erased.numpy()] = self._drawn(draws.of(erased, 2 * TRIES + 3), height, width)
        return tuple(torch.from_numpy(rows))

    def _drawn(self, draws: Draws, height: int, width: int) -> tuple[Sides, ...]:
        """Draw boxes of images that are erased: most are not, and need none."""
        tall, wide = boxes(draws, height * width, self.scale, self.ratio)
        which, found = first((tall < height) & (wide < width))
        tall, wide = tall[which] * found, wide[which]
        draws.uniform()  # which decided that they are
        free = np.maximum(height - tall + 1, 1), np.maximum(width - wide + 1, 1)
        top, left = (draws.integers(torch.from_numpy(room)).numpy() for room in free)
        return top, left, tall, wide

    def overwriting(self) -> "RandomErasing":
        """Return this transform for images that nobody else holds: on a CPU they are changed."""
        other = copy.copy(self)
        other.overwrites = True
        return other

    def __call__(
        self, images: Tensor, top: Tensor, left: Tensor, tall: Tensor, wide: Tensor
    ) -> Tensor:
        sides = (top, left, tall, wide)
        if images.device.type != "cpu" or images.dtype not in (torch.uint8, torch.float32):
            return filled(images, self.value, sides)
        result = images if self.overwrites else images.clone()
        fill_in_place(result, self.value, sides)
        return result


class RandomResizedCrop:
    """Scale a random box of each image to `size`, bilinear without antialiasing."""

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
    ) -> None:
        self.size = _pair(size)
        self.scale = scale
        self.ratio = ratio

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); the middle where ten do not fit."""
        wides, talls = boxes(draws, height * width, self.scale, self.ratio)
        fits = (wides > 0) & (wides <= width) & (talls > 0) & (talls <= height)
        which, some = first(fits)
        found = torch.from_numpy(some)
        middle_tall, middle_wide = self._middle(height, width)
        tall = torch.where(found, torch.from_numpy(talls[which]), middle_tall)
        wide = torch.where(found, torch.from_numpy(wides[which]), middle_wide)
        top = torch.where(
            found, draws.integers((height - tall + 1).clamp(min=1)), (height - middle_tall) // 2
        )
        left = torch.where(
            found, draws.integers((width - wide + 1).clamp(min=1)), (width - middle_wide) // 2
        )
        return top, left, tall, wide

    def _middle(self, height: int, width: int) -> tuple[int, int]:
        if width / height < min(self.ratio):
            return round(width / min(self.ratio)), width
        if width / height > max(self.ratio):
            return height, round(height * max(self.ratio))
        return height, width

    def __call__(
        self, images: Tensor, top: Tensor, left: Tensor, tall: Tensor, wide: Tensor
    ) -> Tensor:
        height, width = images.shape[-2:]
        zero = torch.zeros_like(top, dtype=torch.float32)
        x = wide / width, zero, (2 * left + wide) / width - 1
        y = zero, tall / height, (2 * top + tall) / height - 1
        return sampled(images, x, y, self.size, "bilinear", "border")


class RandomAffine:
    """Rotate, translate and scale each image about its centre; pixels from outside are 0.

    degrees: most to either side; translate: most, as shares of width and height; scale: from, to.
    """

    def __init__(
        self,
        degrees: float,
        translate: Sequence[float] = (0.0, 0.0),
        scale: Sequence[float] = (1.0, 1.0),
        interpolation: str = "nearest",
    ) -> None:
        self.degrees = degrees
        self.translate = translate
        self.scale = scale
        self.interpolation = interpolation

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw angles in radians, whole pixels to the right and down, and scales."""
        most_x, most_y = self.translate[0] * width, self.translate[1] * height
        return (
            draws.uniform(-self.degrees, self.degrees) * (math.pi / 180),
            draws.uniform(-most_x, most_x).round(),
            draws.uniform(-most_y, most_y).round(),
            draws.uniform(self.scale[0], self.scale[1]),
        )

    def __call__(self, images: Tensor, angle: Tensor, x: Tensor, y: Tensor, by: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        cos, sin = torch.cos(angle) / by, torch.sin(angle) / by
        # From output to input pixels about the middle, then in units of half the image's sides.
        x_of = cos, sin * (height / width), -(cos * x + sin * y) * (2 / width)
        y_of = -sin * (width / height), cos, (sin * x - cos * y) * (2 / height)
        return sampled(images, x_of, y_of, (height, width), self.interpolation, "zeros")


class ColorJitter:
    """Change brightness, contrast and saturation of each image, in a random order.

    Each is a strength s (factors from 1 - s, not below 0, to 1 + s).
    """

    def __init__(
        self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0
    ) -> None:
        self.strengths = (brightness, contrast, saturation)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw a factor for each of the three (n, 3), and their order (n, 3)."""
        factors = [draws.uniform(max(0.0, 1 - s), 1 + s) for s in self.strengths]
        return torch.stack(factors, 1), draws.order(3)

    def __call__(self, images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
        return jittered(images, factors, order)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
