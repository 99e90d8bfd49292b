"""Picture files given by name, resized and transformed as a trained network expects."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.decode import read_image
from data.errors import DataError
from data.image_folder import EXTENSIONS, files_below
from data.images import Transform, resized

_ANY_SIZE = (256, 256)  # of pictures that the transforms bring to one size


class Pictures:
    """Picture files without labels: samples are images, transformed.

    `size`: height and width that pictures are resized to before the transforms; None: none.
    """

    def __init__(
        self,
        paths: Sequence[str],
        channels: int = 3,
        size: Sequence[int] | None = None,
        transform: Transform | None = None,
    ) -> None:
        # One array instead of many objects, so that forked workers share its memory.
        self.names = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.channels = channels
        self.size = size
        self.transform = transform

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return os.fsdecode(self.names[index])

    def __getitem__(self, index: int) -> Any:
        return self.brought_to_form(read_image(self.path(index), self.channels))

    def stand_in(self) -> Any:
        """Return a black sample, for a batch of which no file can be read."""
        side = self.size or _ANY_SIZE
        return self.brought_to_form(torch.zeros(self.channels, *side, dtype=torch.uint8))

    def brought_to_form(self, image: Tensor) -> Any:
        """Return a uint8 image (C, H, W), resized and transformed."""
        image = resized(image[None], self.size)[0]
        return image if self.transform is None else self.transform(image)


def find_pictures(source: str, lines: Iterable[str] = ()) -> list[str]:
    """Return the files that `source` names: a folder, a file, a glob, or `-` for `lines`.

    Of a folder all pictures at any depth, sorted. Raises DataError where there is none.
    """
    if source == "-":
        found = [line.rstrip("\n") for line in lines if line.strip()]
    elif os.path.isdir(path := os.path.expanduser(source)):
        found = [os.path.join(path, name) for name in files_below(Path(path), "", [])]
    elif os.path.lexists(path):
        return [path]
    else:
        found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        known = ", ".join(sorted(EXTENSIONS))
        raise DataError(
            "source=-: no file name came on standard input"
            if source == "-"
            else f"source={source} names no picture ({known}): give a folder, a file or a glob"
        )
    return found
