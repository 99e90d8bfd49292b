"""Pictures beside the table: masks, and samples with their labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from conf.errors import ConfigError, Problem
from data.decode import read_image
from data.images import resized
from data.loading.fetch import path_of
from data.pictures import Pictures
from trainer.files.storage import storage_error

_SMALLEST = 128  # pixels of a drawn picture's shorter side
_LINE = 14  # pixels of a line of text


class MaskFiles:
    """Masks as PNG files with a palette, a file for each sample, in a folder beside the table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, index: int, mask: Tensor) -> str:
        """Write one mask of class numbers and return its path."""
        path = self.folder / f"{index:06d}.png"
        _save(mask_picture(mask), path)
        return str(path)


class Drawings:
    """Pictures with their labels written below, in a folder beside the table."""

    def __init__(self, folder: Path, picture: Callable[[int], Tensor]) -> None:
        self.folder = folder
        self._picture = picture
        folder.mkdir(exist_ok=True)

    def __call__(self, index: int, label: str) -> None:
        """Draw one picture, enlarged where it is small."""
        image = self._picture(index).expand(3, -1, -1)
        scale = max(1, -(-_SMALLEST // min(image.shape[-2:])))
        image = resized(image[None], [side * scale for side in image.shape[-2:]])[0]
        height, width = image.shape[-2:]
        canvas = Image.new("RGB", (width, height + _LINE), "white")
        canvas.paste(Image.fromarray(image.permute(1, 2, 0).numpy()))
        ImageDraw.Draw(canvas).text((2, height + 1), label, fill="black")
        _save(canvas, self.folder / f"{index:06d}.png")


def picture_of(dataset: Any, inputs: Mapping[str, Any]) -> Callable[[int], Tensor]:
    """Return what gives a sample's picture before the transforms, uint8 [1 or 3, H, W], by index.

    Raises ConfigError for samples that are no pictures, or none of which a file is known.
    """
    images = getattr(dataset, "images", None)
    if isinstance(images, Tensor) and images.dtype == torch.uint8 and images.shape[1] in (1, 3):
        return images.__getitem__
    is_file = isinstance(dataset, Pictures) or os.path.isfile(path_of(dataset, 0) or "")
    if inputs["kind"] == "picture" and is_file:
        return lambda index: read_image(str(path_of(dataset, index)))
    hint = "source=DIR names picture files"
    raise ConfigError(Problem("draw", "the samples are no picture files", hint))


def mask_picture(mask: Tensor) -> Image.Image:
    """Return a mask [H, W] of class numbers as a picture with a palette."""
    picture = Image.fromarray(mask.to(torch.uint8).numpy(), mode="P")
    picture.putpalette(palette())
    return picture


def palette() -> list[int]:
    """Return 256 colours that differ well: the bits of a number, spread over red, green, blue."""
    colours = []
    for number in range(256):
        for shift in range(3):
            bits = [(number >> (3 * place + shift)) & 1 for place in range(3)]
            colours.append(sum(bit << (7 - place) for place, bit in enumerate(bits)))
    return colours


def _save(picture: Image.Image, path: Path) -> None:
    try:
        picture.save(path)
    except OSError as error:
        raise storage_error(path, error) from error
