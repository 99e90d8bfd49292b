"""Random transforms of image batches (n, C, H, W) with separate draws for each image.

`draw(draws, height, width)` returns one value (or row) for each image, on the CPU. Calling the
transform applies them, without waiting for the device.

An image is augmented the same in any batch, worker or process: its draws depend on its own key
alone, and everything is computed element by element, since sums and matrix products may round
differently in a batch of another size. The distributions are those of torchvision's transforms of
the same names. Draws are new in each epoch, unless a transform says `lasting = True`.
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

_LEAST_RATIO = 0.001  # of the sides of a box, and of a scaled image
_TRIES = 10  # boxes that torchvision draws at most
_FIXED_POINT = 2**24  # the brightness of floating images is averaged in multiples of 1 / this


def _check_bounds(least: float, most: float, /, **options: float | Sequence[float]) -> None:
    """Raise ValueError for an option, or an entry of one, out of bounds, infinite or NaN."""
    for name, value in options.items():
        numbers = value if isinstance(value, Sequence) else [value]
        if not all(least <= number <= most and math.isfinite(number) for number in numbers):
            bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ValueError(f"{name}={value}: expected {bounds}")


@dataclass
class RandomHorizontalFlip:
    """Mirror each image with probability p; with `masks`, its target (n, ..., H, W) as well."""

    p: float = 0.5
    masks: bool = False
    axis: ClassVar[int] = -1
    moves_pixels: ClassVar[bool] = True  # so that boxes would stay behind
    in_place = False  # set by the loader if nobody else holds the images: on a CPU they are changed

    def __post_init__(self) -> None:
        _check_bounds(0, 1, p=self.p)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image."""
        return (draws.uniform() < self.p,)

    def __call__(self, images: Tensor, flip: Tensor) -> Tensor:
        return self._flipped(images, flip, self.in_place)

    def on_masks(self, masks: Tensor, flip: Tensor) -> Tensor:
        """Mirror targets."""
        return self._flipped(masks, flip, False)

    def _flipped(self, images: Tensor, flip: Tensor, in_place: bool) -> Tensor:
        if not _is_numpy_compatible(images):
            # On a device the host does not know which images to flip, and does not wait for it.
            mask = flip.view(-1, *[1] * (images.ndim - 1))
            return torch.where(mask, images.flip(self.axis), images)
        result = images if in_place else images.clone()
        rows = flip.nonzero().squeeze(1)
        # numpy copies whole images; torch copies their elements, which takes several times as long.
        result.numpy()[rows.numpy()] = images.index_select(0, rows).flip(self.axis).numpy()
        return result


@dataclass
class AlternatingFlip(RandomHorizontalFlip):
    """Mirror a random half of the images in even epochs and the other half in odd ones.

    So each image is seen both ways in any two epochs (Jordan 2024).
    """

    p: float = field(default=0.5, init=False)
    lasting = True  # the half is drawn once, for all epochs

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Decide for each image by its key, and invert the decision in odd epochs."""
        flip = draws.uniform() < self.p
        return (~flip if draws.epoch % 2 else flip,)


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
    moves_pixels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(1, math.inf, size=self.size)
        _check_bounds(0, math.inf, padding=self.padding)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw the top left corners. Raises DataError if the window is larger than the images."""
        tall, wide = _pair(self.size)
        free_rows = height + 2 * self.padding - tall
        free_columns = width + 2 * self.padding - wide
        if min(free_rows, free_columns) < 0:
            raise DataError(
                f"a crop of {(tall, wide)} does not fit into images of {height} x {width} with "
                f"padding {self.padding}"
            )
        return draws.integers(free_rows + 1), draws.integers(free_columns + 1)

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

        # Whole rows of the windows are copied: where each begins in the memory of the batch.
        rows = _row_starts(images.shape, tall, images.device, _stream(images.device))
        starts = torch.add(left, top, alpha=width)[:, None] + rows
        # Row i of this view is the `wide` elements from i on, so one gather copies all rows.
        runs = images.view(-1).as_strided((images.numel() - wide + 1, wide), (1, 1))
        return runs.index_select(0, starts.view(-1)).view(*images.shape[:-2], tall, wide)


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

    def __post_init__(self) -> None:
        _check_bounds(0, 1, p=self.p, scale=self.scale)
        _check_bounds(_LEAST_RATIO, math.inf, ratio=self.ratio)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); height 0 if nothing is erased."""
        # An image's numbers 0 to 19 make its boxes, number 20 decides whether it is erased. Looking
        # at that one first saves the others of most images.
        erased = (Draws(draws.keys, drawn=2 * _TRIES).uniform() < self.p).numpy()
        draws = Draws(draws.keys[erased])
        talls, wides = _boxes(draws, height * width, self.scale, self.ratio)
        fits = (talls < height) & (wides < width)
        tall, wide, any_fits = _first_fitting(fits, talls, wides)

        draws.drawn += 1  # behind number 20
        top = draws.integers(torch.from_numpy(np.maximum(height - tall + 1, 1)))
        left = draws.integers(torch.from_numpy(np.maximum(width - wide + 1, 1)))
        boxes = np.zeros((4, len(erased)), np.int64)
        boxes[:, erased] = top.numpy(), left.numpy(), np.where(any_fits, tall, 0), wide
        return tuple(torch.from_numpy(boxes))

    def __call__(self, images: Tensor, *box: Tensor) -> Tensor:
        values = (self.value,) if isinstance(self.value, int | float) else tuple(self.value)
        value = constants(values, images.device, images.dtype)
        if _is_numpy_compatible(images):
            return self._erased_on_host(images, value, box)
        # Slicing by tensors would make the host wait for the device: masks do not.
        top, left, tall, wide = box
        in_rows = _covered(top, tall, images.shape[-2])
        in_columns = _covered(left, wide, images.shape[-1])
        erased = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        return torch.where(erased, value, images)

    def _erased_on_host(self, images: Tensor, value: Tensor, box: Values) -> Tensor:
        result = images if self.in_place else images.clone()
        pixel = value.numpy()
        # The boxes are on the host as well: nothing waits for a device.
        boxes = torch.stack(box, 1).tolist()
        for image, (top, left, tall, wide) in zip(result.numpy(), boxes, strict=True):
            if tall:
                image[:, top : top + tall, left : left + wide] = pixel
        return result


@dataclass
class RandomResizedCrop:
    """Scale a random box of each image to `size`, bilinear without antialiasing."""

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    moves_pixels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(1, math.inf, size=self.size)
        _check_bounds(0, 1, scale=self.scale)
        _check_bounds(_LEAST_RATIO, math.inf, ratio=self.ratio)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw boxes (top, left, height, width); the middle of an image if none of ten fits."""
        wides, talls = _boxes(draws, height * width, self.scale, self.ratio)
        fits = (wides > 0) & (wides <= width) & (talls > 0) & (talls <= height)
        tall, wide, any_fits = _first_fitting(fits, talls, wides)
        # As torchvision, the largest centred box whose aspect ratio is within the limits.
        middle_tall = min(height, round(width / min(self.ratio)))
        middle_wide = min(width, round(height * max(self.ratio)))
        top, box_height = _interval(draws, height, tall, any_fits, middle_tall)
        left, box_width = _interval(draws, width, wide, any_fits, middle_wide)
        return top, left, box_height, box_width

    def __call__(self, images: Tensor, *box: Tensor) -> Tensor:
        top, left, tall, wide = box
        height, width = images.shape[-2:]
        zero = torch.zeros_like(top, dtype=torch.float32)
        x = (wide / width, zero, (2 * left + wide) / width - 1)
        y = (zero, tall / height, (2 * top + tall) / height - 1)
        return _sampled(images, x, y, _pair(self.size), "bilinear", "border")


@dataclass
class RandomAffine:
    """Rotate, translate and scale each image about its centre; pixels from outside are 0.

    degrees: largest angle to either side; translate: largest shift, as fractions of width and
    height; scale: from, to.
    """

    degrees: float
    translate: Sequence[float] = (0.0, 0.0)
    scale: Sequence[float] = (1.0, 1.0)
    interpolation: str = "nearest"
    moves_pixels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(0, math.inf, degrees=self.degrees)
        _check_bounds(0, 1, translate=self.translate)
        _check_bounds(_LEAST_RATIO, math.inf, scale=self.scale)

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw angles in radians, whole pixels to the right and down, and scales."""
        max_x = self.translate[0] * width
        max_y = self.translate[1] * height
        return (
            draws.uniform(-self.degrees, self.degrees) * (math.pi / 180),
            draws.uniform(-max_x, max_x).round(),
            draws.uniform(-max_y, max_y).round(),
            draws.uniform(self.scale[0], self.scale[1]),
        )

    def __call__(
        self, images: Tensor, angle: Tensor, x: Tensor, y: Tensor, scale: Tensor
    ) -> Tensor:
        height, width = images.shape[-2:]
        cos = torch.cos(angle) / scale
        sin = torch.sin(angle) / scale
        # The inverse map, from output to input pixels, in units of half the image's sides.
        input_x = (cos, sin * (height / width), -(cos * x + sin * y) * (2 / width))
        input_y = (-sin * (width / height), cos, (sin * x - cos * y) * (2 / height))
        return _sampled(images, input_x, input_y, (height, width), self.interpolation, "zeros")


@dataclass
class ColorJitter:
    """Change brightness, contrast and saturation of each image, in a random order.

    Each is a strength s (factors from 1 - s, not below 0, to 1 + s).
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        _check_bounds(
            0,
            math.inf,
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
        )

    def draw(self, draws: Draws, height: int, width: int) -> Values:
        """Draw a factor for each of the three (n, 3), and their order (n, 3)."""
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [draws.uniform(max(0.0, 1 - s), 1 + s) for s in strengths]
        return torch.stack(factors, 1), draws.order(3)

    def __call__(self, images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
        is_integer = not images.is_floating_point()
        white = 255 if is_integer else 1
        result = images.to(torch.float32) if is_integer else images
        for property_number in order.unbind(1):
            # Each image's factor for the property that is next in its order: (n, 1, 1, 1).
            factor = factors.gather(1, property_number[:, None])[:, :, None, None]
            base = _blend_base(result, property_number.view(-1, 1, 1, 1), is_integer)
            result = (result * factor + base * (1 - factor)).clamp(0, white)
            if is_integer:
                result = result.floor()
        return result.to(images.dtype)


def _blend_base(images: Tensor, property_number: Tensor, is_integer: bool) -> Tensor:
    """Return the images that a factor of 0 gives: (n, 1 or C, H, W).

    Black for brightness (0), the mean grey for contrast (1), each pixel's grey for saturation (2).
    """
    grey = images
    if images.shape[1] == 3:
        grey = images[:, :1] * 0.2989 + images[:, 1:2] * 0.587 + images[:, 2:] * 0.114
        if is_integer:
            grey = grey.floor()
    # The mean is a sum of integers: exact, so equal in any batch.
    unit = 1 if is_integer else _FIXED_POINT
    total = (grey * unit).round_().to(torch.int64).sum((-3, -2, -1), keepdim=True)
    mean = total.to(grey.dtype) / (unit * grey[0].numel())
    return torch.where(property_number == 0, 0.0, torch.where(property_number == 1, mean, grey))


def _stream(device: torch.device) -> int:
    return current_stream(device).stream_id if has_streams(device) else 0


# Numbers that depend on sizes alone, of which a run has few: each batch would launch kernels for
# them, and launches are what limits small networks. A stream has its own, so that what one writes
# or frees is in order with what reads it.
@functools.lru_cache(maxsize=4)
def _row_starts(shape: torch.Size, tall: int, device: torch.device, stream: int) -> Tensor:
    """Return where the first `tall` rows of images (n, ..., H, W) begin in memory (n, rows)."""
    height, width = shape[-2:]
    image_size = shape[1:].numel()
    planes = torch.arange(0, image_size, height * width, device=device)
    rows = torch.arange(tall, device=device) * width
    images = torch.arange(shape[0], device=device) * image_size
    return images[:, None] + (planes[:, None] + rows).view(-1)


@functools.lru_cache(maxsize=8)
def _positions(side: int, device: torch.device, stream: int) -> Tensor:
    return torch.arange(side, device=device)


def _is_numpy_compatible(images: Tensor) -> bool:
    return images.device.type == "cpu" and images.dtype != torch.bfloat16


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _covered(first: Tensor, length: Tensor, side: int) -> Tensor:
    """Return for each image which positions are in [first, first + length): (n, side)."""
    positions = _positions(side, first.device, _stream(first.device))
    return (positions >= first[:, None]) & (positions < (first + length)[:, None])


def _boxes(draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float]) -> Any:
    """Draw ten boxes for each image: sqrt(area * ratio) and sqrt(area / ratio), both (10, n).

    In numpy, whose calls take half as long as torch's.
    """
    unit = draws.uniform(each=2 * _TRIES).numpy().T
    areas = (unit[:_TRIES] * np.float32(scale[1] - scale[0]) + np.float32(scale[0])) * area
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    logs = unit[_TRIES:] * np.float32(high - low) + np.float32(low)
    ratios = torch.from_numpy(logs).exp().numpy()  # numpy's exponential has other last bits
    first_sides = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
    second_sides = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
    return first_sides, second_sides


def _first_fitting(fits: Any, talls: Any, wides: Any) -> tuple[Any, Any, Any]:
    """Return the height and width of each image's first box that fits, and whether one does (n)."""
    first = fits.argmax(0)
    images = np.arange(len(first))
    return talls[first, images], wides[first, images], fits.any(0)


def _interval(
    draws: Draws, side: int, length: Any, any_fits: Any, middle: int
) -> tuple[Tensor, Tensor]:
    """Place boxes along a side: return their first positions and lengths, both (n,).

    Boxes that do not fit are replaced by the middle of the side, of length `middle`.
    """
    lengths = torch.from_numpy(np.where(any_fits, length, middle))
    first = draws.integers((side - lengths + 1).clamp(min=1))
    return torch.where(torch.from_numpy(any_fits), first, (side - middle) // 2), lengths


def _sampled(
    images: Tensor, x: Values, y: Values, size: tuple[int, int], mode: str, outside: str
) -> Tensor:
    """Sample images at affine coordinates; integer images are rounded.

    x, y: (a, b, c), each (n,): the output pixel at (u, v) is read at a u + b v + c. Coordinates run
    from -1 to 1 over the image. mode, outside: `mode` and `padding_mode` of `grid_sample`.
    """
    values = images if images.is_floating_point() else images.to(torch.float32)
    height, width = size
    u = torch.linspace(1 / width - 1, 1 - 1 / width, width, device=images.device)
    v = torch.linspace(1 / height - 1, 1 - 1 / height, height, device=images.device)
    coordinates = []
    for affine in (x, y):
        a, b, c = (number[:, None, None] for number in affine)
        coordinates.append((a * u) + (b * v[:, None] + c))
    grid = torch.stack(coordinates, -1).to(values.dtype)
    result = grid_sample(values, grid, mode, outside, align_corners=False)
    return result if images.is_floating_point() else result.round_().to(images.dtype)
