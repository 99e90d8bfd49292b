"""Decode image files, JPEG by torchvision and other formats by Pillow; large JPEG files in part."""

import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from regimen.data.errors import UnreadableError, reason

# Pillow's limit against decompression bombs.
MAX_PIXELS = 89_478_485
# From this size on, decoding at a fraction by Pillow is faster than whole by torchvision.
LARGE_PIXELS = 2_000_000
# Those that Pillow may open; of others, some start programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB"}
_BITS_PER_SAMPLE = 258  # TIFF's tag
# Four times as fast on small images as Pillow, with the same pixels. Not the function around it,
# which warns at each call that it is deprecated (0.29).
_decode_jpeg = torch.ops.image.decode_jpeg.default
Channels = Literal[1, 3]  # of a picture that is read, whatever the file holds
# Values of a grey picture of more than 8 bits that become 0 and 255; None: all that it can hold.
Range = Sequence[float] | None
_APP1 = b"\xff\xe1"  # the marker of a JPEG file's segments with EXIF and XMP
# EXIF's orientations, and what brings a picture upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(path: Path | str, channels: int = 3, value_range: Range = None) -> Tensor:
    """Return an image file as uint8 (channels, H, W), rotated by its EXIF orientation.

    value_range: the least and the largest value of a grey picture of more than 8 bits. Raises
    UnreadableError, naming the file, if it cannot be read completely.
    """
    return decode_image(read_content(path), path, channels, value_range)


def decode_image(
    data: bytes, path: Path | str, channels: int = 3, value_range: Range = None
) -> Tensor:
    """Return the image of a file's bytes as `read_image` does; `path` is for messages."""
    if not data:
        raise UnreadableError(f"cannot decode {path}: the file is empty")
    width, height, components = _frame(data)
    _check_size(width, height, path)
    # Pillow decodes CMYK (also Adobe's inverted form) and the grey of colour files; and it decodes
    # what torchvision cannot, or raises.
    if components in (1, channels):
        with suppress(RuntimeError):
            # Channels: 1 = grey, 3 = RGB, as in torchvision.io.ImageReadMode. Its own reading of
            # the orientation misses EXIF behind other segments, other number formats and XMP.
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image: Tensor = _decode_jpeg(content, channels, False)
            return _turned(image, _orientation_of_jpeg(data))
    with _opened(data, path) as opened:
        _check_size(*opened.size, path)
        opened.load()  # PNG may have its EXIF behind the pixels
        turn = _orientation(opened)
        return _turned(planes_of(opened, path, channels, value_range), turn)


def as_tensor(image: Image.Image) -> Tensor:
    """Return a picture of Pillow's as uint8 (C, H, W): a grey one has one channel, others three."""
    plain = _to_eight_bits(image, "a picture", None)
    return _planes(plain if plain.mode in ("L", "RGB") else plain.convert("RGB"))


def planes_of(
    image: Image.Image, path: Path | str, channels: int, value_range: Range = None
) -> Tensor:
    """Return a picture of Pillow's as uint8 (channels, H, W); `path` is for messages."""
    return _planes(_to_eight_bits(image, path, value_range).convert(_MODES[channels]))


def read_levels(path: Path | str) -> NDArray[np.int64]:
    """Return the values (H, W) of a grey picture or the numbers of a palette's colours, unscaled.

    Raises UnreadableError, also for colours.
    """
    data = read_content(path)
    if not data:
        raise UnreadableError(f"cannot decode {path}: the file is empty")
    with _opened(data, path) as image:
        _check_size(*image.size, path)
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise UnreadableError(
                f"cannot decode {path}: {image.mode} pixels are colours: a mask is grey or has a "
                "palette, and its values are class numbers"
            )
        image.load()
        turn = _orientation(image)
        upright = image.transpose(_TURNS[turn]) if turn in _TURNS else image
        return np.asarray(upright).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Depth:
    """What a file holds that 8 bits cannot."""

    is_grey: bool  # else of colours the upper 8 bits are read
    states_range: bool  # whether the file says which of its values is white
    largest: int | None  # value; None of colours, or where it was not measured


def depth_of(data: bytes, path: Path | str, measures: bool) -> Depth | None:
    """Return what a file holds in more than 8 bits a value; None for all others.

    measures: decode the file for its largest value. Raises UnreadableError.
    """
    is_png = data[:8] == b"\x89PNG\r\n\x1a\n"
    if is_png and data[24:25] != b"\x10":
        return None
    if is_png and data[25:26] != b"\x00":
        return Depth(False, False, None)
    with _opened(data, path) as image:
        bits = _stated_bits(image)
        if not image.mode.startswith(("I", "F")):
            return Depth(False, False, None) if bits > 8 else None
        largest = None
        if measures:
            _check_size(*image.size, path)
            largest = int(np.nanmax(np.asarray(image)))
        return Depth(True, image.format == "PPM" or bits not in (16, 32), largest)


@dataclass(frozen=True, slots=True)
class LargeJpeg:
    """A JPEG file that is not decoded yet, since it may be needed at a fraction of its size."""

    data: bytes
    path: str
    channels: int
    height: int  # of the upright picture
    width: int

    def part(self, box: list[int], size: list[int]) -> Tensor:
        """Return a box (top, left, height, width) of the picture at a size (channels, *size).

        Bilinear with antialiasing. The file is decoded at 1/2, 1/4 or 1/8 of its size, as far as
        the box is then no smaller than `size`; bit-equal to the whole one's where it is not.
        """
        by = min(box[2] // size[0], box[3] // size[1])
        scale = next((power for power in (8, 4, 2) if by >= power), 1)
        if scale == 1:
            return _cut(decode_image(self.data, self.path, self.channels), box, size)
        top, left, tall, wide = (side / scale for side in box)
        with _opened(self.data, self.path) as image:
            turn = _orientation(image)
            image.draft(None, (image.width // scale, image.height // scale))
            upright = image.transpose(_TURNS[turn]) if turn in _TURNS else image
            upright = upright.convert(_MODES[self.channels])
        # The file's last rows and columns are rounded up to a whole pixel; they may come first now.
        left += (upright.width - self.width / scale) * (turn in (2, 3, 6, 7))
        top += (upright.height - self.height / scale) * (turn in (3, 4, 7, 8))
        edges = (left, top, left + wide, top + tall)
        return _planes(upright.resize((size[1], size[0]), Image.Resampling.BILINEAR, edges))


def open_image(path: str, channels: int = 3, value_range: Range = None) -> Tensor | LargeJpeg:
    """Return a large JPEG file for a part of it to be decoded; decode what else there is."""
    data = read_content(path)
    width, height, components = _frame(data)
    if LARGE_PIXELS <= width * height <= MAX_PIXELS and components in (1, channels):
        with suppress(UnreadableError), _opened(data, path) as image:
            sideways = _orientation(image) in (5, 6, 7, 8)
            sides = (width, height) if sideways else (height, width)
            return LargeJpeg(data, path, channels, *sides)
    return decode_image(data, path, channels, value_range)


def quick_form(step: Any) -> Any:
    """Return a bilinear RandomResizedCrop or Resize in a form that also takes LargeJpeg files.

    The draws are the same, and so is the result for 8-bit images. Other steps are returned as they
    are.
    """
    if type(step) not in (v2.RandomResizedCrop, v2.Resize) or not step.antialias:
        return step
    mode = getattr(step.interpolation, "value", step.interpolation)
    return step if mode != "bilinear" or getattr(step, "max_size", None) else _Resizing(step)


class _Resizing:
    """torchvision's step without the classes around its two calls.

    Bit-equal to torchvision's on CPUs with AVX2; on others torchvision rounds once more.
    """

    takes_files = True
    _blank = torch.zeros(1, 1, 1, dtype=torch.uint8)

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, image: Any) -> Any:
        if isinstance(image, LargeJpeg):
            return image.part(*self._place(image.height, image.width))
        if type(image) is not Tensor or image.dtype != torch.uint8 or image.ndim != 3:
            return self.step(image)
        return _cut(image, *self._place(*image.shape[1:]))

    def _place(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Return the box (top, left, height, width) that is taken, and its size afterwards."""
        size = list(self.step.size)
        if isinstance(self.step, v2.RandomResizedCrop):
            drawn = self.step.make_params([self._blank.expand(1, height, width)])
            return [drawn[side] for side in ("top", "left", "height", "width")], size
        if len(size) == 1:  # of the shorter side
            long = int(size[0] * max(height, width) / min(height, width))
            size = [size[0], long] if height <= width else [long, size[0]]
        return [0, 0, height, width], size


def _cut(image: Tensor, box: list[int], size: list[int]) -> Tensor:
    top, left, tall, wide = box
    part = image[None, :, top : top + tall, left : left + wide]
    return interpolate(part, size, mode="bilinear", antialias=True)[0]


def read_content(path: Path | str) -> bytes:
    """Return a file's bytes; raise UnreadableError, also for a pipe, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read()
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or reason(error)}") from error
    raise UnreadableError(f"cannot read {path}: it is not a regular file")


@contextmanager
def _opened(data: bytes, path: Path | str) -> Iterator[Image.Image]:
    """Open a file with Pillow; whatever fails on the way is an UnreadableError that names it."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except UnreadableError:
        raise
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        why = "no image format that is known" if unknown else reason(error)
        raise UnreadableError(f"cannot decode {path}: {why}") from error


def _orientation(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, that Pillow reads from EXIF or XMP; 1 where it cannot."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF of any kind: the pixels are whole
        return 1
    return next((turn for turn in _TURNS if turn == found), 1)


def _orientation_of_jpeg(data: bytes) -> int:
    """Return a JPEG file's orientation. Most have no segment that could tell it."""
    if _APP1 not in data:
        return 1
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return _orientation(image)
    except Exception:  # torchvision has read its pixels
        return 1


def _turned(image: Tensor, turn: int) -> Tensor:
    """Return an image (C, H, W) upright, as `_TURNS` does for Pillow's."""
    if turn >= 5:
        image = image.transpose(-1, -2)
    if turn in (2, 3, 6, 7):
        image = image.flip(-1)
    if turn in (3, 4, 7, 8):
        image = image.flip(-2)
    return image.contiguous()


def _frame(data: bytes) -> tuple[int, int, int]:
    """Return a JPEG file's width, height and number of components; zeros for other files."""
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while position + 9 < len(data) and data[position] == 0xFF:
        if 0xC0 <= data[position + 1] <= 0xCF and data[position + 1] not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[position + 5 : position + 7])
            return int.from_bytes(data[position + 7 : position + 9]), height, data[position + 9]
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return 0, 0, 0


def _check_size(width: int, height: int, path: Path | str) -> None:
    if width * height > MAX_PIXELS:
        size = f"{width} x {height} pixels are more than {MAX_PIXELS}"
        raise UnreadableError(f"refused to decode {path}: {size}")


def _planes(image: Image.Image) -> Tensor:
    pixels = np.asarray(image)
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.array(planes, order="C"))


def _to_eight_bits(image: Image.Image, path: Path | str, value_range: Range) -> Image.Image:
    """Scale greys of more than 8 bits to 8; Pillow's conversion would clip them at 255.

    The range is divided into 256 levels of one width: of 16 bits the upper 8 are left.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    stated = 2 ** _stated_bits(image) - 1
    if (
        image.format == "PPM" and image.mode != "F"
    ):  # Pillow has scaled it by the white that the file states
        value_range = None
    if value_range is None and (image.mode == "F" or values.min() < 0 or values.max() > 65535):
        raise UnreadableError(
            f"cannot decode {path}: {image.mode} pixels have no known range: set data.range"
        )
    low, high = value_range or (0, min(stated, 65535))
    width = high - low if image.mode == "F" else high - low + 1
    levels = np.floor((values.astype(np.float64) - low) * (256 / width))
    if not np.isfinite(levels).all():
        raise UnreadableError(f"cannot decode {path}: a pixel is NaN or infinite")
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _stated_bits(image: Image.Image) -> int:
    """Return the bits of a value that a file states: TIFF may pack 12; 16 for other greys."""
    stated = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, 16)
    return int(max(stated)) if isinstance(stated, tuple) else int(stated)
