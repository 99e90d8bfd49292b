"""Small data sets and image files for the tests of `data`."""

import os
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import build_data
from regimen.trainer.assembly.loaders import eval_loader, train_loader


class Noisy:
    """Samples that draw from torch, python and numpy; one of them can misbehave."""

    def __init__(self, samples=20, bad=None):
        self.samples = samples
        self.bad = bad or {}

    def __len__(self):
        return self.samples

    def path(self, index):
        return f"/pictures/{index}.jpg"

    def __getitem__(self, index):
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
def noisy():
    """The class of misbehaving data sets."""
    return Noisy


@pytest.fixture
def write_image():
    """A function that writes a small image file and returns its path."""

    def write(path, size=(12, 10), mode="RGB", **save):
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = sum(path.name.encode())
        pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, **save)
        return path

    return write


@pytest.fixture
def picture_tree(tmp_path, write_image):
    """A folder tree: train with 10 cats and 6 dogs, test with 2 of each; no val."""
    for folder, count in (("train/cat", 10), ("train/dog", 6), ("test/cat", 2), ("test/dog", 2)):
        for number in range(count):
            write_image(tmp_path / folder / f"{number:02d}.jpg")
    return tmp_path


def _built(*words, rank=0, world=1):
    config = parse(compose(list(words)).config)
    data = build_data(config)
    group = SimpleNamespace(rank=rank, data_rank=rank, data_size=world)
    strategy = SimpleNamespace(group=group, device=torch.device("cpu"))
    test = data.sets["test"]
    held_out = [] if test is None else [eval_loader(config, test, strategy, limit=3)]
    return [train_loader(config, data, strategy), *held_out]


@pytest.fixture
def built():
    """A function from overrides to the loaders of a rank: of training, and of test if there is."""
    return _built


@pytest.fixture
def seen():
    """A function from overrides to what a network sees of each sample, over all ranks."""

    def run(*words, world=1):
        found = {}
        for rank in range(world):
            loader, *_ = _built(*words, rank=rank, world=world)
            for micro in loader.epoch(1):
                kept = micro.batch_slice.indices[: micro.batch_slice.count]
                found |= dict(zip(kept, micro.batch[0], strict=False))
            loader.close()
        return found

    return run
