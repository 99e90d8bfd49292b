"""Random transforms of image batches (n, C, H, W) with a draw of its own for each image.

Each has two halves: `draw(samples, height, width, generator)` returns one value (or row) for every
image of the global batch, on the CPU; calling it applies such draws to the images at hand, without
waiting for their device. The distributions are those of torchvision's transforms of these names.
"""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torchvision.transforms.v2 import functional as F

from data.errors import DataError
from data.transforms import Constants

Draws = tuple[Tensor, ...]
_TRIES = 10  # boxes drawn before torchvision gives up


class RandomHorizontalFlip:
    """Mirror each image with probability p; with `masks`, its target (n, ..., H, W) as well."""

    axis = -1

    def __init__(self, p: float = 0.5, masks: bool = False) -> None:
        self.p = p
        self.masks = masks

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
        """Decide for each image."""
        return (torch.rand(samples, generator=generator) < self.p,)

    def __call__(self, images: Tensor, flip: Tensor) -> Tensor:
        return torch.where(_column(flip, images), images.flip(self.axis), images)

    on_masks = __call__


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

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
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
        return tuple(torch.randint(room, (samples,), generator=generator) for room in free)

    def __call__(self, images: Tensor, top: Tensor, left: Tensor) -> Tensor:
        return self._windows(images, top, left, self.fill)

    def on_masks(self, masks: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Cut the same windows from targets."""
        flat = masks.reshape(len(masks), -1, *masks.shape[-2:])
        cut = self._windows(flat, top, left, self.mask_fill)
        return cut.reshape(*masks.shape[:-2], *self.size)

    def _windows(self, images: Tensor, top: Tensor, left: Tensor, fill: float) -> Tensor:
        if self.padding:
            images = F.pad(images, [self.padding], fill=fill, padding_mode=self.padding_mode)
        rows = top[:, None] + torch.arange(self.size[0], device=images.device)
        columns = left[:, None] + torch.arange(self.size[1], device=images.device)
        every = torch.arange(len(images), device=images.device)[:, None, None]
        windows = images[every, :, rows[:, :, None], columns[:, None, :]]
        return windows.movedim(-1, 1).contiguous()


class RandomErasing:
    """Overwrite a random box of each image by `value` with probability p (Zhong et al. 2017).

    value: a number, or one for each channel, on the scale of the images at this point.
    """

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

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
        """Draw boxes (top, left, height, width); height 0 where nothing is erased."""
        tall, wide = _boxes(samples, height * width, self.scale, self.ratio, generator)
        chosen, found = _first((tall < height) & (wide < width))
        tall, wide = tall.gather(1, chosen)[:, 0], wide.gather(1, chosen)[:, 0]
        tall = torch.where(found & (torch.rand(samples, generator=generator) < self.p), tall, 0)
        top = _integers(height - tall + 1, generator)
        left = _integers(width - wide + 1, generator)
        return top, left, tall, wide

    def __call__(
        self, images: Tensor, top: Tensor, left: Tensor, tall: Tensor, wide: Tensor
    ) -> Tensor:
        rows = _within(top, tall, images.shape[-2])
        columns = _within(left, wide, images.shape[-1])
        box = (rows[:, :, None] & columns[:, None, :])[:, None]
        if isinstance(self.value, int | float):
            return images.masked_fill(box, self.value)
        return torch.where(box, self.value.beside(images, images.dtype), images)


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

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
        """Draw boxes (top, left, height, width); the middle where ten do not fit."""
        wide, tall = _boxes(samples, height * width, self.scale, self.ratio, generator)
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        chosen, found = _first(fits)
        middle_tall, middle_wide = self._middle(height, width)
        tall = torch.where(found, tall.gather(1, chosen)[:, 0], middle_tall)
        wide = torch.where(found, wide.gather(1, chosen)[:, 0], middle_wide)
        top = torch.where(
            found, _integers(height - tall + 1, generator), (height - middle_tall) // 2
        )
        left = torch.where(
            found, _integers(width - wide + 1, generator), (width - middle_wide) // 2
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
        # affine_grid's coordinates run from -1 to 1 over the whole image.
        x = torch.stack([wide / width, zero, (2 * left + wide) / width - 1], 1)
        y = torch.stack([zero, tall / height, (2 * top + tall) / height - 1], 1)
        return _sampled(images, torch.stack([x, y], 1), self.size, "bilinear", "border")


class RandomAffine:
    """Turn, shift and scale each image about its middle; what comes into view is 0.

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

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
        """Draw angles in radians, whole pixels to the right and down, and scales."""

        def uniform(low: float, high: float) -> Tensor:
            return torch.empty(samples).uniform_(low, high, generator=generator)

        most_x, most_y = self.translate[0] * width, self.translate[1] * height
        return (
            uniform(-self.degrees, self.degrees) * (math.pi / 180),
            uniform(-most_x, most_x).round(),
            uniform(-most_y, most_y).round(),
            uniform(self.scale[0], self.scale[1]),
        )

    def __call__(self, images: Tensor, angle: Tensor, x: Tensor, y: Tensor, by: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        cos, sin = torch.cos(angle) / by, torch.sin(angle) / by
        # From output to input pixels about the middle, then in units of half the image's sides.
        row_x = torch.stack([cos, sin * (height / width), -(cos * x + sin * y) * (2 / width)], 1)
        row_y = torch.stack([-sin * (width / height), cos, (sin * x - cos * y) * (2 / height)], 1)
        theta = torch.stack([row_x, row_y], 1)
        return _sampled(images, theta, (height, width), self.interpolation, "zeros")


class ColorJitter:
    """Change brightness, contrast and saturation of each image, in an order of its own.

    Each is a strength s (factors from 1 - s, not below 0, to 1 + s).
    """

    def __init__(
        self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0
    ) -> None:
        self.strengths = (brightness, contrast, saturation)

    def draw(self, samples: int, height: int, width: int, generator: Generator) -> Draws:
        """Draw a factor for each of the three (n, 3), and their order (n, 3)."""
        factors = [
            torch.empty(samples).uniform_(max(0.0, 1 - s), 1 + s, generator=generator)
            for s in self.strengths
        ]
        order = torch.rand(samples, 3, generator=generator).argsort(1)
        return torch.stack(factors, 1), order

    def __call__(self, images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
        whole = not images.is_floating_point()
        result = images.to(torch.float32) if whole else images
        for turn in order.unbind(1):
            factor = factors.gather(1, turn[:, None])[:, :, None, None]
            towards = self._towards(result, _column(turn, result), whole)
            result = result * factor + towards * (1 - factor)
            result = result.clamp(0, 255 if whole else 1)
            result = result.floor() if whole else result
        return result.to(images.dtype)

    def _towards(self, images: Tensor, turn: Tensor, whole: bool) -> Tensor:
        """Return what factor 0 leads to: black, the mean grey, or each pixel's grey."""
        grey = _grey(images)
        grey = grey.floor() if whole and images.shape[1] == 3 else grey
        mean = grey.mean((-3, -2, -1), keepdim=True)
        still = grey if images.shape[1] == 3 else images
        return torch.where(turn == 0, 0.0, torch.where(turn == 1, mean, still))


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return red * 0.2989 + green * 0.587 + blue * 0.114


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _column(values: Tensor, images: Tensor) -> Tensor:
    return values.view(-1, *[1] * (images.ndim - 1))


def _boxes(
    samples: int, area: int, scale: Sequence[float], ratio: Sequence[float], generator: Generator
) -> tuple[Tensor, Tensor]:
    """Draw ten boxes for each image: sides whose product is the area and quotient the ratio."""
    shape = (samples, _TRIES)
    areas = torch.empty(shape).uniform_(scale[0], scale[1], generator=generator) * area
    logs = torch.empty(shape).uniform_(math.log(ratio[0]), math.log(ratio[1]), generator=generator)
    return (areas * logs.exp()).sqrt().round().long(), (areas / logs.exp()).sqrt().round().long()


def _first(fits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column (n, 1) of the first box that fits, and whether one does (n)."""
    return fits.long().argmax(1, keepdim=True), fits.any(1)


def _integers(bounds: Tensor, generator: Generator) -> Tensor:
    """Draw an integer from 0 to below each bound."""
    draws = torch.rand(bounds.shape, generator=generator, dtype=torch.float64)
    return (draws * bounds.clamp(min=1)).long()


def _within(first: Tensor, length: Tensor, side: int) -> Tensor:
    positions = torch.arange(side, device=first.device)
    return (positions >= first[:, None]) & (positions < (first + length)[:, None])


def _sampled(
    images: Tensor, theta: Tensor, size: tuple[int, int], mode: str, outside: str
) -> Tensor:
    """Read images at affine grids (n, 2, 3); integer images are rounded back."""
    values = images if images.is_floating_point() else images.to(torch.float32)
    shape = [len(images), images.shape[1], *size]
    grid = torch.nn.functional.affine_grid(theta.to(values.dtype), shape, align_corners=False)
    read = torch.nn.functional.grid_sample(values, grid, mode, outside, align_corners=False)
    return read if images.is_floating_point() else read.round().to(images.dtype)
