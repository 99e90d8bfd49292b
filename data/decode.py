"""Decode image files: JPEG by torchvision, other formats by Pillow, large JPEG files in part."""

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
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from regimen.data.errors import UnreadableError, reason

# Pillow's limit against decompression bombs.
MAX_PIXELS = 89_478_485
# From this size on, decoding at a fraction by Pillow is faster than whole by torchvision.
LARGE_PIXELS = 2_000_000
# Formats that Pillow may open. Some others start programs, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB"}
_BITS_PER_SAMPLE = 258  # TIFF's tag
# Four times as fast on small images as Pillow, with the same pixels. It is the operator, since the
# function `torchvision.io.decode_jpeg` warns at each call that it is deprecated (0.29).
_decode_jpeg = torch.ops.image.decode_jpeg.default
Channels = Literal[1, 3]  # of the decoded image, whatever the file holds
# The values of a grey image of more than 8 bits that become 0 and 255; None: all that it can hold.
Range = Sequence[float] | None
_APP1 = b"\xff\xe1"  # the marker of a JPEG file's segments with EXIF and XMP
# EXIF's orientations, from 1, that are brought upright by exchanging rows and columns, and then by
# reversing columns or rows.
_TRANSPOSED = (5, 6, 7, 8)
_COLUMNS_REVERSED = (2, 3, 6, 7)
_ROWS_REVERSED = (3, 4, 7, 8)


def read_image(path: Path | str, channels: int = 3, value_range: Range = None) -> Tensor:
    """Return an image file as uint8 (channels, H, W), rotated by its EXIF orientation.

    value_range: the values of a grey image of more than 8 bits that become 0 and 255.
    Raises UnreadableError, naming the file, if it cannot be read completely.
    """
    return decode_image(read_content(path), path, channels, value_range)


def decode_image(
    data: bytes, path: Path | str, channels: int = 3, value_range: Range = None
) -> Tensor:
    """Return the image of a file's bytes as `read_image` does; `path` is for messages."""
    width, height, components = _frame(data)
    _check_size(width, height, path)
    # Left to Pillow: CMYK (also Adobe's inverted form), the grey of colour files, and files that
    # torchvision cannot decode.
    if components in (1, channels):
        with suppress(RuntimeError):
            # The operator's own reading of the orientation is off (False): it misses EXIF behind
            # other segments, other number formats and XMP.
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            image: Tensor = _decode_jpeg(content, channels, False)
            return _upright(image, _orientation_of_jpeg(data))
    with _opened(data, path) as opened:
        opened.load()  # PNG may have its EXIF behind the pixels
        orientation = _orientation(opened)
        return _upright(pil_to_channels(opened, path, channels, value_range), orientation)


def pil_to_tensor(image: Image.Image) -> Tensor:
    """Return a Pillow image as uint8 (C, H, W): one channel if it is grey, else three."""
    plain = _to_eight_bits(image, "a picture", None)
    return _planes(plain if plain.mode in ("L", "RGB") else plain.convert("RGB"))


def pil_to_channels(
    image: Image.Image, path: Path | str, channels: int, value_range: Range = None
) -> Tensor:
    """Return a Pillow image as uint8 (channels, H, W); `path` is for messages."""
    return _planes(_to_eight_bits(image, path, value_range).convert(_MODES[channels]))


def read_mask(path: Path | str) -> Tensor:
    """Return the values (H, W) of a grey image, or the palette numbers of its pixels, unscaled.

    Raises UnreadableError, also for colours.
    """
    with _opened(read_content(path), path) as image:
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise UnreadableError(
                f"cannot decode {path}: {image.mode} pixels are colours: a mask is grey or has a "
                "palette, and its values are class numbers"
            )
        image.load()  # PNG may have its EXIF behind the pixels
        values = np.asarray(image).astype(np.int64)
        return _upright(torch.from_numpy(values), _orientation(image))


@dataclass(frozen=True, slots=True)
class Depth:
    """The values of a file of more than 8 bits."""

    is_grey: bool  # of colours, the upper 8 bits are read
    states_range: bool  # whether the file says which of its values is white
    largest: int | None  # None for colours, and if it was not measured


def read_depth(data: bytes, path: Path | str, measures: bool) -> Depth | None:
    """Return the depth of a file of more than 8 bits a value; None for all others.

    measures: decode the file for its largest value. Raises UnreadableError.
    """
    colours = Depth(is_grey=False, states_range=False, largest=None)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        # From PNG's header, as Pillow opens 16-bit colours with 8 bits: byte 24 holds the bits of a
        # value, byte 25 the colour type, which is 0 for grey.
        if data[24:25] != b"\x10":
            return None
        if data[25:26] != b"\x00":
            return colours
    with _opened(data, path) as image:
        bits = _stated_bits(image)
        if not image.mode.startswith(("I", "F")):
            return colours if bits > 8 else None
        largest = None
        if measures:
            largest = int(np.nanmax(np.asarray(image)))
        states_range = image.format == "PPM" or bits not in (16, 32)
        return Depth(True, states_range, largest)


@dataclass(frozen=True, slots=True)
class LargeJpeg:
    """A JPEG file that is not decoded yet, since a fraction of its size may be enough."""

    data: bytes
    path: str
    channels: int
    height: int  # of the upright image
    width: int

    def part(self, box: list[int], size: list[int]) -> Tensor:
        """Return a box (top, left, height, width) of the image at a size (channels, *size).

        Bilinear with antialiasing. The file is decoded at 1/8, 1/4 or 1/2 of its size if the box is
        then no smaller than `size`; else the result is bit-equal to that of the whole image.
        """
        top, left, tall, wide = box
        reduction = min(tall // size[0], wide // size[1])
        scale = next((power for power in (8, 4, 2) if power <= reduction), 1)
        if scale == 1:
            return _resized_box(decode_image(self.data, self.path, self.channels), box, size)

        with _opened(self.data, self.path) as image:
            orientation = _orientation(image)
            image.draft(None, (image.width // scale, image.height // scale))
            upright = image.convert(_MODES[self.channels])
        if orientation != 1:
            upright = to_pil_image(_upright(_planes(upright), orientation))
        left_edge = left / scale
        top_edge = top / scale
        # The decoder rounds the file's last column and row up to a whole pixel. If the orientation
        # reverses them, the excess comes first.
        if orientation in _COLUMNS_REVERSED:
            left_edge += upright.width - self.width / scale
        if orientation in _ROWS_REVERSED:
            top_edge += upright.height - self.height / scale
        edges = (left_edge, top_edge, left_edge + wide / scale, top_edge + tall / scale)
        return _planes(upright.resize((size[1], size[0]), Image.Resampling.BILINEAR, edges))


def open_image(path: str, channels: int = 3, value_range: Range = None) -> Tensor | LargeJpeg:
    """Return a `LargeJpeg`, of which a region can be decoded; decode any other image now."""
    data = read_content(path)
    width, height, components = _frame(data)
    if LARGE_PIXELS <= width * height <= MAX_PIXELS and components in (1, channels):
        with suppress(UnreadableError), _opened(data, path) as image:
            if _orientation(image) in _TRANSPOSED:
                return LargeJpeg(data, path, channels, height=width, width=height)
            return LargeJpeg(data, path, channels, height, width)
    return decode_image(data, path, channels, value_range)


def fast_resize(step: Any) -> Any:
    """Return a bilinear RandomResizedCrop or Resize in a form that also takes LargeJpeg files.

    It draws the same, and its result for 8-bit images is the same. Other steps are returned as they
    are.
    """
    if type(step) not in (v2.RandomResizedCrop, v2.Resize) or not step.antialias:
        return step
    mode = getattr(step.interpolation, "value", step.interpolation)
    if mode != "bilinear" or getattr(step, "max_size", None):
        return step
    return _QuickResize(step)


class _QuickResize:
    """torchvision's step without the classes around its two calls.

    Bit-equal to torchvision's on CPUs with AVX2; on others torchvision rounds once more.
    """

    takes_files = True
    _blank = torch.zeros(1, 1, 1, dtype=torch.uint8)

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, image: Any) -> Any:
        if isinstance(image, LargeJpeg):
            box, size = self._box_and_size(image.height, image.width)
            return image.part(box, size)
        if type(image) is not Tensor or image.dtype != torch.uint8 or image.ndim != 3:
            return self.step(image)
        box, size = self._box_and_size(*image.shape[1:])
        return _resized_box(image, box, size)

    def _box_and_size(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Return the box (top, left, height, width) to cut, and the size that it is brought to."""
        size = list(self.step.size)
        if isinstance(self.step, v2.RandomResizedCrop):
            # torchvision draws for an image, of which it looks at the size alone.
            drawn = self.step.make_params([self._blank.expand(1, height, width)])
            return [drawn[side] for side in ("top", "left", "height", "width")], size
        if len(size) == 1:  # the shorter side; the longer one keeps the aspect ratio
            longer = int(size[0] * max(height, width) / min(height, width))
            size = [size[0], longer] if height <= width else [longer, size[0]]
        return [0, 0, height, width], size


def _resized_box(image: Tensor, box: list[int], size: list[int]) -> Tensor:
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
    """Open a file with Pillow; any failure becomes an UnreadableError that names it."""
    if not data:
        raise UnreadableError(f"cannot decode {path}: the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, path)
            yield image
    except UnreadableError:
        raise
    except Exception as error:
        if isinstance(error, UnidentifiedImageError):
            raise UnreadableError(f"cannot decode {path}: no image format that is known") from error
        raise UnreadableError(f"cannot decode {path}: {reason(error)}") from error


def _orientation(image: Image.Image) -> int:
    """Return the orientation, 1 to 8, that Pillow reads from EXIF or XMP; 1 if it cannot."""
    try:
        stored = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF of any kind: the pixels are whole
        return 1
    # Compared, not looked up: a file may store a value of any type.
    return next((number for number in range(1, 9) if number == stored), 1)


def _orientation_of_jpeg(data: bytes) -> int:
    """Return a JPEG file's orientation. Most files have no segment that could hold one."""
    if _APP1 not in data:
        return 1
    # A file that Pillow cannot open is no failure: torchvision has decoded its pixels.
    with suppress(UnreadableError), _opened(data, "") as image:
        return _orientation(image)
    return 1


def _upright(image: Tensor, orientation: int) -> Tensor:
    """Return an image (..., H, W) upright."""
    if orientation in _TRANSPOSED:
        image = image.transpose(-1, -2)
    if orientation in _COLUMNS_REVERSED:
        image = image.flip(-1)
    if orientation in _ROWS_REVERSED:
        image = image.flip(-2)
    return image.contiguous()


def _frame(data: bytes) -> tuple[int, int, int]:
    """Return a JPEG file's width, height and number of components; zeros for other files.

    They stand in the first frame header, a segment SOF0 to SOF15 (ITU-T T.81, B.2.2).
    """
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        # C4, C8 and CC are in the range but no frame headers: Huffman tables, reserved, arithmetic.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[position + 5 : position + 7])
            width = int.from_bytes(data[position + 7 : position + 9])
            return width, height, data[position + 9]
        segment_length = int.from_bytes(data[position + 2 : position + 4])
        position += 2 + segment_length
    return 0, 0, 0


def _check_size(width: int, height: int, path: Path | str) -> None:
    if width * height > MAX_PIXELS:
        raise UnreadableError(
            f"refused to decode {path}: {width} x {height} pixels are more than {MAX_PIXELS}"
        )


def _planes(image: Image.Image) -> Tensor:
    pixels = np.asarray(image)
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.array(planes, order="C"))


def _to_eight_bits(image: Image.Image, path: Path | str, value_range: Range) -> Image.Image:
    """Scale greys of more than 8 bits to 8; Pillow's conversion would clip them at 255.

    The range is divided into 256 levels of equal width, so the full range of 16 bits gives the
    upper 8.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.format == "PPM" and image.mode != "F":
        value_range = None  # Pillow has scaled it by the white that the file states
    if value_range is None:
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise UnreadableError(
                f"cannot decode {path}: {image.mode} pixels have no known range: set data.range"
            )
        value_range = (0, min(2 ** _stated_bits(image) - 1, 65535))

    low, high = value_range
    width = high - low if image.mode == "F" else high - low + 1
    levels = np.floor((values.astype(np.float64) - low) * (256 / width))
    if not np.isfinite(levels).all():
        raise UnreadableError(f"cannot decode {path}: a pixel is NaN or infinite")
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _stated_bits(image: Image.Image) -> int:
    """Return the bits of a value that a file states (TIFF may pack 12); 16 for other greys."""
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, 16)
    return int(max(bits)) if isinstance(bits, tuple) else int(bits)
