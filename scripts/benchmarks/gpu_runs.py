"""What `gpu` trains from configurations: airbench94, resnet18_cifar10, and the JPEG pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from conf.check import parse
from data.loading.on_device import OnDevice
from scripts.benchmarks.by_hand.airbench import MEAN, STD, train_by_hand
from scripts.benchmarks.image_files import image_folder
from scripts.composition.compose import compose
from trainer.build.data import build_data, train_loader
from trainer.build.experiment import Experiment, build
from trainer.strategies.strategy import Strategy

BY_HAND, OURS = "by hand", "Regimen"
_FILES = 300  # different ones, each linked many times
_WORKERS = 16  # at most


@dataclass(frozen=True, slots=True)
class Rig:
    """Where the benchmark runs, and how much of it."""

    device: torch.device
    root: Path | None
    updates: int  # of a turn
    small: bool  # a trial without a GPU
    mode: str | None = "default"  # of torch.compile; None: not compiled
    caches: dict[str, Any] = field(default_factory=dict)  # decoded images by split, read once

    @property
    def compile_word(self) -> str:
        """The override of `trainer.compile`."""
        return f"trainer.compile={{mode: {self.mode}}}" if self.mode else "trainer.compile=false"

    def wait(self) -> float:
        """Return the time when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def airbench(rig: Rig, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds and accuracies of both, the compiling turn left out."""
    seconds: dict[str, list[float]] = {BY_HAND: [], OURS: []}
    accuracies: dict[str, list[float]] = {BY_HAND: [], OURS: []}
    for turn in range(rounds + 1):
        for name in seconds:
            took, share = _plain(rig) if name == BY_HAND else _ours(rig)
            print(f"airbench94, turn {turn}, {name}: {took:.2f} s, {share:.2%}", flush=True)
            if turn:
                seconds[name].append(took)
                accuracies[name].append(100 * share)
    return seconds, accuracies


def _airbench_words(rig: Rig) -> list[str]:
    words = ["experiment=airbench94", "callbacks=[whitening]"]
    if rig.small:
        words += ["model.widths=[8,16,16]", "loader.batch_size=20", "trainer.max_epochs=2"]
    return words


def _opened(rig: Rig, words: list[str]) -> Experiment:
    """Build an experiment on CIFAR-10 as image files, all of them for training.

    Images are decoded once for all parts and turns, which compare nothing of it.
    """
    words = [*words, "data=cifar10_folder", f"data.root={rig.root}", "data.val_fraction=0"]
    words += ["data.cache=device", "strategy.devices=1", rig.compile_word]
    experiment = build(parse(compose(words).config), Strategy(rig.device))
    for split in ("train", "test"):
        dataset = experiment.data.sets[split]
        dataset.cache = rig.caches.setdefault(split, dataset.cache)
        dataset.fill_cache(lambda: False)
    return experiment


def _ours(rig: Rig) -> tuple[float, float]:
    return _timed(rig, _opened(rig, _airbench_words(rig)))


def _timed(rig: Rig, experiment: Experiment) -> tuple[float, float]:
    """Return the seconds of the training and the test, and the share of the test images."""
    trainer = experiment.trainer
    loaders: list[Any] = [trainer.train_loader, experiment.test_loader]
    for loader in loaders:
        if loader.loader.kept is not None:
            loader.loader.kept.fill()
    since = rig.wait()
    trainer.fit()
    metrics = trainer.evaluate(experiment.test_loader, "test")
    return rig.wait() - since, metrics["test/accuracy"]


def _plain(rig: Rig) -> tuple[float, float]:
    experiment = _opened(rig, _airbench_words(rig))
    parts = []
    for split in ("train", "test"):
        parts += [part.to(rig.device) for part in experiment.data.sets[split].tensors()]
    since = rig.wait()
    share = train_by_hand(experiment.config, experiment.trainer.model, parts)
    return rig.wait() - since, share


def trained_whole(rig: Rig) -> tuple[float, float]:
    """Train `resnet18_cifar10` to its end; return seconds, compiling included, and % right."""
    words = ["experiment=resnet18_cifar10", "callbacks=none", "loader.num_workers=0"]
    words += ["trainer.precision=bf16"]
    if rig.small:
        words += ["model=small_cnn", "trainer.max_epochs=1"]
    took, share = _timed(rig, _opened(rig, words))
    return took, 100 * share


def jpeg_loaders(rig: Rig, folder: Path, batch: int) -> tuple[Iterable[Any], OnDevice]:
    """Return loaders of JPEG files, by hand and ours, each an epoch of a turn's updates."""
    tree, _ = image_folder("imagenet", folder, 500, 4 if rig.small else _FILES)
    place = tree / "train" / "pictures"
    files = sorted(path.resolve() for path in place.iterdir())
    for number in range(len(files), rig.updates * batch):
        (place / f"{number:06d}.jpg").symlink_to(files[number % len(files)])
    workers = 0 if rig.small else min(_WORKERS, os.cpu_count() or 1)
    crop: list[Any] = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()]
    transform = v1.Compose([*crop, v1.ToTensor(), v1.Normalize(MEAN, STD)])
    by_hand = DataLoader(
        ImageFolder(str(tree / "train"), transform),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=rig.device.type == "cuda",
    )
    words = ["experiment=resnet18", "data=image_folder", f"data.root={tree}", "transforms=imagenet"]
    words += ["data.val_fraction=0", f"loader.batch_size={batch}", "loader.drop_last=true"]
    words += [f"loader.num_workers={workers}", "loader.persistent_workers=false"]
    config = parse(compose(words).config)
    strategy = Strategy(rig.device)
    return by_hand, train_loader(config, build_data(config, ("train",)), strategy)
