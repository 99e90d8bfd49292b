"""Decode image files: JPEG by torchvision, other formats by Pillow."""

import importlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from data.errors import UnreadableError, reason
from data.formats.jpeg import Box, box_of_jpeg

# Pillow's limit against decompression bombs.
MAX_PIXELS = 89_478_485
# From this size on, decoding at a fraction by Pillow is faster than whole by torchvision.
LARGE_PIXELS = 2_000_000
_MODES = {1: "L", 3: "RGB"}
CHANNELS = tuple(_MODES)  # that a picture can be read with

_END = b"\xff\xd9"  # of a JPEG file
Decode = Literal["full", "scaled", "region"]

# What makes a picture upright, by its EXIF orientation (1: nothing).
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# By which of them rows (axis 1) and columns (axis 2) of the upright picture are mirrored. From 5 on
# they have changed places before.
_MIRRORED = {1: (3, 4, 7, 8), 2: (2, 3, 6, 7)}


def read_image(path: Path | str, channels: int = 3) -> Tensor:
    """Return an image file as uint8 (channels, H, W), rotated by its EXIF orientation.

    Raises UnreadableError, naming the file, if it cannot be read completely.
    """
    try:
        data = _content(path)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or reason(error)}") from error
    return decode_image(data, path, channels)


def _content(path: Path | str) -> bytes:
    """Return a file's bytes; raise UnreadableError for a pipe, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError(f"cannot read {path}: it is not a regular file")
        return file.read()


def decode_image(data: bytes, path: Path | str, channels: int = 3) -> Tensor:
    """Return the image of a file's bytes as `read_image` does; `path` is for messages."""
    if not data:
        raise UnreadableError(f"cannot decode {path}: the file is empty")
    if _is_plain_jpeg(data, path, channels):
        image = _by_torchvision(data, channels)
        if image is not None:
            return image
    try:
        return _by_pillow(data, path, channels)
    except UnreadableError:
        raise
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        text = "no image format that is known" if unknown else reason(error)
        raise UnreadableError(f"cannot decode {path}: {text}") from error


@dataclass(frozen=True, slots=True)
class JpegFile:
    """A JPEG file that is not decoded yet, since only a part of it is needed, at some size."""

    data: bytes
    path: str
    channels: int
    height: int  # of the upright picture
    width: int
    orientation: int
    decode: Decode

    def decoded(self) -> Tensor:
        """Return the whole picture (channels, H, W), as `decode_image` does."""
        return decode_image(self.data, self.path, self.channels)

    def part(self, box: Box, size: tuple[int, int]) -> Tensor | None:
        """Return a box of the picture at a size (channels, *size), bilinear with antialiasing.

        None where the whole picture has to be decoded for it.
        """
        return self.scaled(box, size) if self.decode == "scaled" else self.region(box, size)

    def region(self, box: Box, size: tuple[int, int]) -> Tensor | None:
        """Return a box at a size, bit-equal to that of the whole picture, decoding little else.

        None for the whole picture, and for a file that is broken or has no end, which the decoder
        of whole pictures may refuse.
        """
        if box == (0, 0, self.height, self.width) or not self.data.endswith(_END):
            return None
        pixels = box_of_jpeg(self.data, self.channels, self._in_file(box))
        if pixels is None:
            return None
        planes = self._turned(torch.from_numpy(pixels).permute(2, 0, 1))
        return interpolate(planes[None], size, mode="bilinear", antialias=True)[0]

    def scaled(self, box: Box, size: tuple[int, int]) -> Tensor | None:
        """Return a box of the picture at a size (channels, *size), bilinear with antialiasing.

        It is decoded at 1/2, 1/4 or 1/8 of its size, as far as the box is then no smaller than
        `size`. None if it is smaller even at 1/2.
        """
        by = min(box[2] // size[0], box[3] // size[1])
        scale = next((power for power in (8, 4, 2) if by >= power), None)
        if scale is None:
            return None
        try:
            return self._decoded_at(scale, box, size)
        except Exception as error:
            raise UnreadableError(f"cannot decode {self.path}: {reason(error)}") from error

    def _decoded_at(self, scale: int, box: Box, size: tuple[int, int]) -> Tensor:
        top, left, tall, wide = (side / scale for side in self._in_file(box))
        sideways = self.orientation > 4
        with Image.open(io.BytesIO(self.data)) as image:
            image.draft(None, (image.width // scale, image.height // scale))
            mode = _MODES[self.channels]
            whole = image if image.mode == mode else image.convert(mode)
            edges = (left, top, left + wide, top + tall)
            out = size if sideways else size[::-1]
            part = whole.resize(out, Image.Resampling.BILINEAR, edges)
        upright = part.transpose(_TURNS[self.orientation]) if self.orientation > 1 else part
        return _planes(np.asarray(upright), self.channels)

    def _turned(self, planes: Tensor) -> Tensor:
        """Return pixels of the file (channels, H, W) as the upright picture has them."""
        upright = planes.transpose(1, 2) if self.orientation > 4 else planes
        axes = [axis for axis, turns in _MIRRORED.items() if self.orientation in turns]
        return upright.flip(axes) if axes else upright

    def _in_file(self, box: Box) -> Box:
        """Return the box of the picture as the file has it, before it is turned upright."""
        top, left, tall, wide = box
        turn, sideways = self.orientation, self.orientation > 4
        right, below = self.width - left - wide, self.height - top - tall
        across = right if turn in _MIRRORED[2] else left
        down = below if turn in _MIRRORED[1] else top
        return (across, down, wide, tall) if sideways else (down, across, tall, wide)


def open_image(path: str, channels: int = 3, decode: Decode = "scaled") -> Tensor | JpegFile:
    """Return a JPEG file for a part of it to be decoded, and what else there is decoded.

    decode: "scaled" (large files only) or "region". Raises UnreadableError.
    """
    try:
        data = _content(path)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or reason(error)}") from error
    width, height, _ = _frame(data)
    enough = width * height >= (LARGE_PIXELS if decode == "scaled" else 1)
    if not (enough and _is_plain_jpeg(data, path, channels)):
        return decode_image(data, path, channels)
    try:
        turn = _orientation(data)
    except Exception:
        return decode_image(data, path, channels)
    sides = (width, height) if turn > 4 else (height, width)
    return JpegFile(data, path, channels, *sides, turn, decode)


def _orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG file, 1 where there is none."""
    if all(marker != 0xE1 for marker, _ in _segments(data)):
        return 1  # Pillow would take a tenth of the time of decoding to say so
    with Image.open(io.BytesIO(data)) as image:
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
    return turn if turn in _TURNS else 1


def _is_plain_jpeg(data: bytes, path: Path | str, channels: int) -> bool:
    """Return whether torchvision decodes a file as Pillow does, by its header.

    Pillow decodes CMYK (also Adobe's inverted form) and the grey of colour files. Raises
    UnreadableError for too many pixels.
    """
    width, height, components = _frame(data)
    _check_size(width, height, path)
    return components in (1, channels)


def _frame(data: bytes) -> tuple[int, int, int]:
    """Return a JPEG file's width, height and number of components; zeros for other files."""
    for marker, position in _segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[position + 5 : position + 7])
            width = int.from_bytes(data[position + 7 : position + 9])
            return width, height, data[position + 9]
    return 0, 0, 0


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield marker and position of the segments of a JPEG file's header; none for other files."""
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while position + 9 < len(data) and data[position] == 0xFF:
        yield data[position + 1], position
        position += 2 + int.from_bytes(data[position + 2 : position + 4])


def _check_size(width: int, height: int, path: Path | str) -> None:
    if width * height > MAX_PIXELS:
        raise UnreadableError(
            f"refused to decode {path}: {width} x {height} pixels are more than {MAX_PIXELS}"
        )


@cache
def _torchvision_decoder() -> Callable[[Tensor, int, bool], Tensor] | None:
    """Return torchvision's JPEG operator, four times as fast on small images as Pillow.

    Not the function around it, which warns at each call that it is deprecated (0.29). None if
    there is no such operator: Pillow gives the same pixels.
    """
    try:
        importlib.import_module("torchvision.io")  # registers it
        operator: Callable[[Tensor, int, bool], Tensor] = torch.ops.image.decode_jpeg.default
    except (ImportError, AttributeError, RuntimeError):
        return None
    return operator


def _by_torchvision(data: bytes, channels: int) -> Tensor | None:
    """Return the image, or None if the decoder fails: Pillow then decodes it or raises."""
    decode = _torchvision_decoder()
    if decode is None:
        return None
    try:
        # Channels: 1 = grey, 3 = RGB, as in torchvision.io.ImageReadMode; upright by EXIF.
        return decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), channels, True)
    except RuntimeError:
        return None


def _by_pillow(data: bytes, path: Path | str, channels: int) -> Tensor:
    with Image.open(io.BytesIO(data)) as opened:
        _check_size(*opened.size, path)
        image = ImageOps.exif_transpose(opened)
        pixels = np.asarray(_to_eight_bits(image, path).convert(_MODES[channels]))
    return _planes(pixels, channels)


def _planes(pixels: npt.NDArray[np.uint8], channels: int) -> Tensor:
    planes = pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.array(planes, order="C"))


def _to_eight_bits(image: Image.Image, path: Path | str) -> Image.Image:
    """Scale 16-bit greys to 8 bits; Pillow's conversion would clip them at 255."""
    if image.mode == "F":
        raise UnreadableError(f"cannot decode {path}: floating point pixels have no known range")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UnreadableError(f"cannot decode {path}: 32-bit pixels have no known range")
    return Image.fromarray((values >> 8).astype(np.uint8))
