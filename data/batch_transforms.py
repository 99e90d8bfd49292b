"""Random transforms of image batches (n, C, H, W) with separate draws for each image.

`draw(draws, height, width)` returns one value (or row) for each image, on the CPU. Calling the
transform applies them, without waiting for the device. All is computed element by element, so that
the result for an image is bit-equal in any batch: sums and matrix products may round differently in
a batch of another size. The distributions are those of torchvision's transforms of the same names.
Draws are new in each epoch, unless a transform says `lasting = True`.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, constant_pad_nd
from torch.nn.functional import grid_sample
from torchvision.transforms.v2 import functional as F

from regimen.data.errors import DataError
from regimen.data.keys import Draws
from regimen.data.transforms import constants
from regimen.trainer.device import current_stream, has_streams

Values = tuple[Tensor, ...]

_TRIES = 10  # boxes that torchvision draws at most
_FINE = 2**24  # steps in which the brightness of floating images is averaged


@dataclass
class RandomHorizontalFlip:
    """Mirror each image with probability p; with `masks`, its target (n, ..., H, W) as well."""

    p: float = 0.5
    masks: bool = False
    axis: ClassVar[int] = -1
    in_place = False  # set for images that nobody else holds: on a CPU they are changed

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image."""
        return (draws.uniform() < self.p,)

    def __call__(self, images: Tensor, flip: Tensor) -> Tensor:
        return self._turned(images, flip, self.in_place)

    def on_masks(self, masks: Tensor, flip: Tensor) -> Tensor:
        """Mirror targets."""
        return self._turned(masks, flip, False)

    def _turned(self, images: Tensor, flip: Tensor, in_place: bool) -> Tensor:
        if not _of_numpy(images):  # nor does the host know which, on a device
            chosen = flip.view(-1, *[1] * (images.ndim - 1))
            return torch.where(chosen, images.flip(self.axis), images)
        result, rows = images if in_place else images.clone(), flip.nonzero().squeeze(1)
        # numpy copies whole images; torch copies their elements, which takes several times as long.
        result.numpy()[rows.numpy()] = images.index_select(0, rows).flip(self.axis).numpy()
        return result


@dataclass
class AlternatingFlip(RandomHorizontalFlip):
    """Mirror a random half of the images in even epochs and the other half in odd ones.

    So each image is seen both ways in any two epochs (Jordan 2024).
    """

    p: float = field(default=0.5, init=False)
    lasting = True

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image, once and for all, and turn it over in odd epochs."""
        return ((draws.uniform() < self.p) ^ bool(draws.epoch % 2),)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Turn each image upside down with probability p; with `masks`, its target as well."""

    axis: ClassVar[int] = -2


@dataclass
class RandomCrop:
    """Cut a random size x size window from each image, padded first on all sides.

    With `masks`, the same window of the target (n, ..., H, W), padded with `mask_fill`.
    """

    size: int | Sequence[int]
    padding: int = 0
    fill: float = 0.0
    padding_mode: str = "constant"
    masks: bool = False
    mask_fill: int = 0

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw the top left corners."""
        free = [
            side + 2 * self.padding - wanted + 1
            for side, wanted in zip((height, width), _pair(self.size), strict=True)
        ]
        if min(free) < 1:
            images = f"images of {height} x {width} with padding {self.padding}"
            raise DataError(f"a crop of {_pair(self.size)} does not fit into {images}")
        return tuple(draws.integers(room) for room in free)

    def __call__(self, images: Tensor, top: Tensor, left: Tensor) -> Tensor:
        return self._windows(images, top, left, self.fill)

    def on_masks(self, masks: Tensor, top: Tensor, left: Tensor) -> Tensor:
        """Cut the same windows from targets."""
        return self._windows(masks, top, left, self.mask_fill)

    def _windows(self, images: Tensor, top: Tensor, left: Tensor, fill: float) -> Tensor:
        if self.padding and self.padding_mode == "constant":
            images = constant_pad_nd(images, [self.padding] * 4, fill)
        elif self.padding:
            images = F.pad(images, [self.padding], padding_mode=self.padding_mode)
        images = images.contiguous()
        width = images.shape[-1]
        tall, wide = _pair(self.size)
        # Whole rows are copied: where each begins in memory.
        rows = _rows_of(images.shape, tall, images.device, _stream(images.device))
        starts = torch.add(left, top, alpha=width)[:, None] + rows
        every = images.view(-1).as_strided((images.numel() - wide + 1, wide), (1, 1))
        return every.index_select(0, starts.view(-1)).view(*images.shape[:-2], tall, wide)


@dataclass
class RandomErasing:
    """Overwrite a random box of each image by `value` with probability p (Zhong et al. 2017).

    value: a number, or one for each channel, on the scale of the images at this point.
    """

    p: float = 0.5
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    value: float | Sequence[float] = 0.0
    in_place = False  # as that of flips

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); height 0 where nothing is erased."""
        rows = np.zeros((4, len(draws)), np.int64)
        # The number after those of the boxes, which most images need not draw.
        erased = (Draws(draws.keys, drawn=2 * _TRIES).uniform() < self.p).numpy()
        draws = Draws(draws.keys[erased])
        tall, wide = _boxes(draws, height * width, self.scale, self.ratio)
        tall, wide, found = _first((tall < height) & (wide < width), tall, wide)
        draws.drawn += 1
        free = np.maximum(height - tall + 1, 1), np.maximum(width - wide + 1, 1)
        top, left = (draws.integers(torch.from_numpy(room)).numpy() for room in free)
        rows[:, erased] = top, left, tall * found, wide
        return tuple(torch.from_numpy(rows))

    def __call__(self, images: Tensor, *box: Tensor) -> Tensor:
        values = (self.value,) if isinstance(self.value, int | float) else tuple(self.value)
        value = constants(values, images.device, images.dtype)
        if _of_numpy(images):
            result = images if self.in_place else images.clone()
            boxes = zip(*(side.tolist() for side in box), strict=True)
            written = value.numpy()
            for image, (i, j, h, w) in zip(result.numpy(), boxes, strict=True):
                if h:
                    image[:, i : i + h, j : j + w] = written
            return result
        inside = []  # slices by tensors would wait for a device
        for first, length, side in zip(box[:2], box[2:], images.shape[-2:], strict=True):
            positions = _positions(side, images.device, _stream(images.device))
            inside.append((positions >= first[:, None]) & (positions < (first + length)[:, None]))
        erased = inside[0][:, :, None] & inside[1][:, None]
        return torch.where(erased[:, None], value, images)


@dataclass
class RandomResizedCrop:
    """Scale a random box of each image to `size`, bilinear without antialiasing."""

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); the middle where ten do not fit."""
        wides, talls = _boxes(draws, height * width, self.scale, self.ratio)
        fits = (wides > 0) & (wides <= width) & (talls > 0) & (talls <= height)
        *drawn, found = _first(fits, talls, wides)
        narrow, broad = round(width / min(self.ratio)), round(height * max(self.ratio))
        middle = min(height, narrow), min(width, broad)
        some, corner, box = torch.from_numpy(found), [], []
        for whole, side, half in zip((height, width), drawn, middle, strict=True):
            length = torch.from_numpy(np.where(found, side, half))
            first = draws.integers((whole - length + 1).clamp(min=1))
            corner.append(torch.where(some, first, (whole - half) // 2))
            box.append(length)
        return *corner, *box

    def __call__(self, images: Tensor, *box: Tensor) -> Tensor:
        (top, left, tall, wide), (height, width) = box, images.shape[-2:]
        zero = torch.zeros_like(top, dtype=torch.float32)
        x = wide / width, zero, (2 * left + wide) / width - 1
        y = zero, tall / height, (2 * top + tall) / height - 1
        return _sampled(images, x, y, _pair(self.size), "bilinear", "border")


@dataclass
class RandomAffine:
    """Rotate, translate and scale each image about its centre; pixels from outside are 0.

    degrees: most to either side; translate: most, as shares of width and height; scale: from, to.
    """

    degrees: float
    translate: Sequence[float] = (0.0, 0.0)
    scale: Sequence[float] = (1.0, 1.0)
    interpolation: str = "nearest"

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
        return _sampled(images, x_of, y_of, (height, width), self.interpolation, "zeros")


@dataclass
class ColorJitter:
    """Change brightness, contrast and saturation of each image, in a random order.

    Each is a strength s (factors from 1 - s, not below 0, to 1 + s).
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw a factor for each of the three (n, 3), and their order (n, 3)."""
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [draws.uniform(max(0.0, 1 - s), 1 + s) for s in strengths]
        return torch.stack(factors, 1), draws.order(3)

    def __call__(self, images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
        whole = not images.is_floating_point()
        result = images.to(torch.float32) if whole else images
        for turn in order.unbind(1):
            factor = factors.gather(1, turn[:, None])[:, :, None, None]
            towards = _at_factor_0(result, turn.view(-1, 1, 1, 1), whole)
            result = result * factor + towards * (1 - factor)
            result = result.clamp(0, 255 if whole else 1)
            result = result.floor() if whole else result
        return result.to(images.dtype)


def _at_factor_0(images: Tensor, turn: Tensor, whole: bool) -> Tensor:
    """Black for brightness (turn 0), the mean grey for contrast (1), each pixel's for saturation.

    The mean of an image is an exact sum of multiples of 1 / unit.
    """
    grey = images
    if images.shape[1] == 3:
        grey = images[:, :1] * 0.2989 + images[:, 1:2] * 0.587 + images[:, 2:] * 0.114
        grey = grey.floor() if whole else grey
    unit = 1 if whole else _FINE
    summed = (grey * unit).round_().to(torch.int64).sum((-3, -2, -1), keepdim=True)
    mean = summed.to(grey.dtype) / (unit * grey[0].numel())
    return torch.where(turn == 0, 0.0, torch.where(turn == 1, mean, grey))


def _stream(device: torch.device) -> int:
    return current_stream(device).stream_id if has_streams(device) else 0


# Numbers that depend on sizes alone, of which a run has few: each batch would launch kernels for
# them, and launches are what limits small networks. A stream has its own, so that what one writes
# or frees is in order with what reads it.
@functools.lru_cache(maxsize=4)
def _rows_of(shape: torch.Size, tall: int, device: torch.device, stream: int) -> Tensor:
    """Return where the first rows of images (n, ..., H, W) begin in memory (n, rows)."""
    height, width = shape[-2:]
    each = shape[1:].numel()
    planes = torch.arange(0, each, height * width, device=device)
    within_plane = torch.arange(tall, device=device) * width
    images = torch.arange(shape[0], device=device) * each
    return images[:, None] + (planes[:, None] + within_plane).view(-1)


@functools.lru_cache(maxsize=8)
def _positions(side: int, device: torch.device, stream: int) -> Tensor:
    return torch.arange(side, device=device)


def _of_numpy(images: Tensor) -> bool:
    return images.device.type == "cpu" and images.dtype != torch.bfloat16


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _boxes(draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float]) -> Any:
    """Draw ten boxes for each image (10, n), in numpy: its calls take half as long as torch's."""
    unit = draws.uniform(each=2 * _TRIES).numpy().T
    low, high = math.log(ratio[0]), math.log(ratio[1])
    areas = (unit[:_TRIES] * np.float32(scale[1] - scale[0]) + np.float32(scale[0])) * area
    logs = unit[_TRIES:] * np.float32(high - low) + np.float32(low)
    ratios = torch.from_numpy(logs).exp().numpy()  # numpy's exponential has other last bits
    sides = np.sqrt(areas * ratios), np.sqrt(areas / ratios)
    return [np.rint(side).astype(np.int64) for side in sides]


def _first(fits: Any, *sides: Any) -> tuple[Any, ...]:
    """Return the sides of each image's first box that fits, and whether one does (n)."""
    which = fits.argmax(0), np.arange(fits.shape[1])
    return *(side[which] for side in sides), fits.any(0)


def _sampled(
    images: Tensor, x: Values, y: Values, size: tuple[int, int], mode: str, outside: str
) -> Tensor:
    """Sample images at affine coordinates; integer images are rounded.

    x, y: (a, b, c), each (n,): the output pixel at (u, v) is read at a u + b v + c. Coordinates run
    from -1 to 1 over the image. mode, outside: `mode` and `padding_mode` of `grid_sample`.
    """
    values = images if images.is_floating_point() else images.to(torch.float32)
    v, u = (torch.linspace(1 / side - 1, 1 - 1 / side, side, device=images.device) for side in size)
    read_at = []
    for function in (x, y):
        a, b, c = (number[:, None, None] for number in function)
        read_at.append((a * u) + (b * v[:, None] + c))
    grid = torch.stack(read_at, -1).to(values.dtype)
    read = grid_sample(values, grid, mode, outside, align_corners=False)
    return read if images.is_floating_point() else read.round_().to(images.dtype)
