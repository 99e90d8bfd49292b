"""Small data sets and image files for the tests of `data`."""

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conf.check import parse
from data.loading.loader import Loader
from scripts.composition.compose import compose
from trainer.assembly.data import build_data
from trainer.assembly.experiment import eval_loader, train_loader


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
    for folder, count in (("train/cat", 10), ("train/dog", 6), ("test/cat", 2), ("test/dog", 2)):
        for number in range(count):
            write_image(tmp_path / folder / f"{number:02d}.jpg")
    return tmp_path


def _built(*words: str, rank: int = 0, world: int = 1) -> list[Loader]:
    config = parse(compose(list(words)).config)
    data, group = build_data(config), SimpleNamespace(rank=rank, data_rank=rank, data_size=world)
    strategy: Any = SimpleNamespace(group=group, device=torch.device("cpu"))
    test = data.sets["test"]
    held_out = [] if test is None else [eval_loader(config, test, strategy, limit=3)]
    return [train_loader(config, data, strategy), *held_out]


@pytest.fixture
def built() -> Any:
    """A function from overrides to the loaders of a rank: of training, and of test if there is."""
    return _built


@pytest.fixture
def seen() -> Any:
    """A function from overrides to what a network sees of each sample, over all ranks."""

    def run(*words: str, world: int = 1) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for rank in range(world):
            loader, *_ = _built(*words, rank=rank, world=world)
            for micro in loader.epoch(1):
                kept = micro.piece.indices[: micro.piece.count]
                found |= dict(zip(kept, micro.batch[0], strict=False))
            loader.close()
        return found

    return run
