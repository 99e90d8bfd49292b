"""Small data sets and image files for the tests of `data`."""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image


class Noisy:
    """Samples that draw from torch, python and numpy; one of them can misbehave."""

    def __init__(self, samples: int = 20, bad: dict[int, str] | None = None) -> None:
        self.samples = samples
        self.bad = bad or {}

    def __len__(self) -> int:
        return self.samples

    def path(self, index: int) -> str:
        return f"/pictures/{index}.jpg"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fault = self.bad.get(index)
        if fault == "raise":
            raise ValueError("broken\nin two lines")
        if fault == "kill":
            os.kill(os.getpid(), 9)
        if fault == "exit":
            os._exit(3)
        if fault == "memory":
            raise MemoryError
        if fault == "hang":
            while True:
                time.sleep(60)  # the fault itself, not a synchronisation
        draws = [torch.rand(()).item(), random.random(), float(np.random.random())]
        return torch.tensor([index, *draws], dtype=torch.float64), index


@pytest.fixture
def noisy() -> type[Noisy]:
    """The class of misbehaving data sets."""
    return Noisy


@pytest.fixture
def write_image() -> Any:
    """A function that writes a small image file and returns its path."""

    def write(path: Path, size: tuple[int, int] = (12, 10), mode: str = "RGB", **save: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = sum(path.name.encode())
        pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, **save)
        return path

    return write


@pytest.fixture
def picture_tree(tmp_path: Path, write_image: Any) -> Path:
    """A folder tree: train with 10 cats and 6 dogs, test with 2 of each; no val."""
    for split, name, count in [
        ("train", "cat", 10),
        ("train", "dog", 6),
        ("test", "cat", 2),
        ("test", "dog", 2),
    ]:
        for number in range(count):
            write_image(tmp_path / split / name / f"{number:02d}.jpg")
    return tmp_path
