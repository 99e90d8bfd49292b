"""What `gpu` trains from configurations: airbench94, resnet18_cifar10, and the JPEG pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
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
    mode: str = "default"  # of torch.compile

    def wait(self) -> float:
        """Return the time when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def airbench(
    rig: Rig, root: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds and accuracies of both, the compiling turn left out."""
    seconds: dict[str, list[float]] = {BY_HAND: [], OURS: []}
    accuracies: dict[str, list[float]] = {BY_HAND: [], OURS: []}
    for turn in range(rounds + 1):
        for name in seconds:
            took, share = _plain(rig, root) if name == BY_HAND else _ours(rig, root)
            if turn:
                seconds[name].append(took)
                accuracies[name].append(100 * share)
    return seconds, accuracies


def _airbench_config(rig: Rig, root: Path) -> Any:
    words = ["experiment=airbench94", "data=cifar10_folder", f"data.root={root}"]
    words += ["data.val_fraction=0", "callbacks=[whitening]", "strategy.devices=1"]
    words += [f"trainer.compile={{mode: {rig.mode}}}"]
    if rig.small:
        words += ["model.widths=[8,16,16]", "loader.batch_size=20", "trainer.max_epochs=2"]
        words += ["trainer.compile=false"]
    return parse(compose(words).config)


def _ours(rig: Rig, root: Path) -> tuple[float, float]:
    experiment = build(_airbench_config(rig, root), Strategy(rig.device))
    trainer = experiment.trainer
    _fill(experiment)
    since = rig.wait()
    trainer.fit()
    metrics = trainer.evaluate(experiment.test_loader, "test")
    return rig.wait() - since, metrics["test/accuracy"]


def _plain(rig: Rig, root: Path) -> tuple[float, float]:
    config = _airbench_config(rig, root)
    experiment = build(config, Strategy(rig.device))
    sets = [experiment.data.sets[split] for split in ("train", "test")]
    parts = []
    for dataset in sets:
        dataset.fill_cache(lambda: False)
        every = list(range(len(dataset)))
        parts.append(torch.stack([dataset.cache.image(row) for row in every]).to(rig.device))
        parts.append(dataset.targets.to(rig.device))
    since = rig.wait()
    share = train_by_hand(config, experiment.trainer.model, experiment.trainer.optimizers, parts)
    return rig.wait() - since, share


def _fill(experiment: Experiment) -> None:
    """Decode the images and copy them to the device: neither is compared."""
    for split in ("train", "test"):
        experiment.data.sets[split].fill_cache(lambda: False)
    loaders: list[Any] = [experiment.trainer.train_loader, experiment.test_loader]
    for loader in loaders:
        if loader.loader.kept is not None:
            loader.loader.kept.fill()


def trained_whole(rig: Rig, root: Path) -> tuple[float, float]:
    """Train `resnet18_cifar10` to its end; return seconds and % of the test images."""
    words = ["experiment=resnet18_cifar10", "data=cifar10_folder", f"data.root={root}"]
    words += ["data.val_fraction=0", "data.cache=device", "callbacks=none", "strategy.devices=1"]
    words += ["loader.num_workers=0"]
    words += ["trainer.precision=bf16", f"trainer.compile={{mode: {rig.mode}}}"]
    if rig.small:
        words += ["model=small_cnn", "trainer.max_epochs=1", "trainer.compile=false"]
    experiment = build(parse(compose(words).config), Strategy(rig.device))
    _fill(experiment)
    since = rig.wait()
    experiment.trainer.fit()
    metrics = experiment.trainer.evaluate(experiment.test_loader, "test")
    return rig.wait() - since, 100 * metrics["test/accuracy"]


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
