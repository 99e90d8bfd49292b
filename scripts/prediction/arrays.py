"""What is saved beside the table: one array for all samples, masks, and pictures with labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from data.decode import read_image
from data.images import resized
from scripts.prediction.table import fsync
from trainer.files.atomic import sync_folder
from trainer.files.storage import storage_error

_SMALLEST = 128  # pixels of a drawn picture's shorter side
_LINE = 14  # pixels of a line of text


class KeptArray:
    """An array [samples, ...] in a .npy file, written batch by batch, named when it is whole.

    Samples that could not be read are NaN, or 0 in an array of integers.
    """

    def __init__(self, path: Path, samples: int, resume: bool) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._samples = samples
        self._resume = resume
        self._array: Any = None

    def write(self, indices: list[int], values: Tensor) -> None:
        """Set the rows of samples. Raises StorageError."""
        rows = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        try:
            if self._array is None:
                self._array = self._opened(rows)
            self._array[indices] = rows
        except OSError as error:
            raise storage_error(self._part, error) from error

    def finish(self) -> None:
        """Give the file its name. Raises StorageError."""
        if self._array is None:
            return
        try:
            self._array.flush()
            fsync(self._part)
            os.replace(self._part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def _opened(self, rows: Any) -> Any:
        shape = (self._samples, *rows.shape[1:])
        if self._resume and self._part.exists():
            array = np.lib.format.open_memmap(self._part, "r+")
            if array.shape == shape and array.dtype == rows.dtype:
                return array
        array = np.lib.format.open_memmap(self._part, "w+", rows.dtype, shape)
        if np.issubdtype(rows.dtype, np.floating):
            array[:] = np.nan
        return array


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, index: int, path: str, label: str) -> None:
        """Draw one picture, enlarged where it is small."""
        image = read_image(path)
        scale = max(1, -(-_SMALLEST // min(image.shape[-2:])))
        image = resized(image[None], [side * scale for side in image.shape[-2:]])[0]
        height, width = image.shape[-2:]
        canvas = Image.new("RGB", (width, height + _LINE), "white")
        canvas.paste(Image.fromarray(image.permute(1, 2, 0).numpy()))
        ImageDraw.Draw(canvas).text((2, height + 1), label, fill="black")
        _save(canvas, self.folder / f"{index:06d}.png")


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
