"""Decode image files: JPEG by torchvision, other formats by Pillow."""

import importlib
import io
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from data.errors import UnreadableError, reason

# Pillow's limit against decompression bombs.
MAX_PIXELS = 89_478_485
_MODES = {1: "L", 3: "RGB"}


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
    if data[:2] == b"\xff\xd8" and _is_plain_jpeg(data, path, channels):
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


def _is_plain_jpeg(data: bytes, path: Path | str, channels: int) -> bool:
    """Return whether torchvision decodes a file as Pillow does, by its header.

    Pillow decodes CMYK (also Adobe's inverted form) and the grey of colour files. Raises
    UnreadableError for too many pixels.
    """
    position = 2
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[position + 5 : position + 7])
            width = int.from_bytes(data[position + 7 : position + 9])
            _check_size(width, height, path)
            return data[position + 9] in (1, channels)
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return False


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
