"""Digits as image files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_digits(
    root: Path,
    counts: Mapping[str, int],
    classes: int = 10,
    size: int = 8,
    colour: bool = False,
    named: str = "{}",
    suffix: str = "png",
) -> Path:
    """Write digits as root/SPLIT/CLASS/NUMBER.png: so many of each class in each split."""
    images, labels = load_digits(return_X_y=True)
    for label in range(classes):
        is_own = labels == label
        pictures = iter(images[is_own])
        for split, count in counts.items():
            folder = root / split / named.format(label)
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = next(pictures).reshape(8, 8) * 15.9
                grown = np.kron(pixels, np.ones((size // 8, size // 8)))
                picture = Image.fromarray(grown.astype(np.uint8))
                if colour:
                    picture = picture.convert("RGB")
                picture.save(folder / f"{number:03}.{suffix}")
    return root
