"""What data loading costs: our transforms by name, against torchvision's default for each sample.

Three kinds of images: in memory, small JPEG files, and JPEG files of ImageNet's size. Every loader
is built from the shipped YAML. Its reference is `ImageFolder`, or images in memory as torchvision's
`CIFAR10` has them, with Pillow and `torchvision.transforms`, sample by sample, and as many workers.

A rate is that of a whole pass. The first pass is not counted: it starts workers, warms the file
cache and fills ours. Without workers it is by the CPU's time, which other processes change least;
with workers by the clock. Images are taken from `$DATA_ROOT` where `cifar10/train` and `imagenet`
are there; else they are made up, about as large.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from conf.check import parse
from data.images import ImageTensors
from data.loading.batch_forms import defer
from data.loading.on_device import OnDevice
from scripts.benchmarks.report import Report, Row, one_thread
from scripts.composition.compose import compose
from trainer.build.data import Data, build_data, build_pipeline, train_loader

BATCH = 128
IN_MEMORY, SMALL, LARGE = 4000, 2000, 300  # images of a pass
LARGE_BATCH, LARGE_WORKERS = 64, 2
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

Sample = tuple[Tensor, int]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that yields batches of images for a pass."""

    name: str
    reference: str
    batches: Callable[[], Iterable[Tensor]]
    workers: int = 0


class InMemory(Dataset[Sample]):
    """Images in memory, made into a Pillow image for each access, as torchvision's `CIFAR10`."""

    def __init__(self, images: Tensor, transform: Callable[[Any], Tensor]) -> None:
        self.images = images.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return self.transform(Image.fromarray(self.images[index])), 0


def measure(rounds: int) -> Report:
    """Let every contender make a pass `rounds` times, in turn, and compare."""
    with tempfile.TemporaryDirectory() as folder, one_thread():
        small, made_small = _folder("cifar10/train", Path(folder), 32, SMALL)
        large, made_large = _folder("imagenet", Path(folder), 500, LARGE)
        contenders = [*_memory(), *_small(small), *_large(large)]
        rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for turn in range(rounds + 1):
            for contender in contenders:
                rate = _rate(contender)
                if turn:
                    rates[contender.name].append(rate)
    rows = [_row(contender, rates) for contender in contenders]
    ratios = {row.name: row.ratio for row in rows if row.name != row.reference}
    return Report(
        name="data",
        title="Loading and transforming images, one thread in the main process",
        unit="images/s",
        rows=rows,
        headlines={
            "ratio_to_reference": _least(ratios, "in memory"),
            "small_jpeg_cached": _least(ratios, "small JPEG, cache"),
            "large_jpeg": _least(ratios, "large JPEG"),
        },
        settings={"rounds": rounds, "made_up": {"small": made_small, "large": made_large}},
    )


def _least(ratios: dict[str, float | None], name: str) -> float:
    return min(ratio for key, ratio in ratios.items() if key.startswith(name) and ratio)


def _memory() -> Iterator[Contender]:
    colour = pictures(IN_MEMORY, 32, 3)
    grey = pictures(IN_MEMORY, 16, 1)
    for images, transforms, kind in (
        (grey, ("shift",), "digits"),
        (colour, ("crop_flip", "on_device"), "CIFAR-sized"),
    ):
        side, reference = images.shape[-1], f"{kind}, torchvision"
        loader = DataLoader(InMemory(images, _default(side, images.shape[1])), BATCH, shuffle=True)
        yield Contender(reference, reference, lambda loader=loader: _inputs(loader))  # type: ignore[misc]
        for name in transforms:
            ours = ours_in_memory(images, f"transforms={name}")
            yield Contender(f"in memory, {name}", reference, _passes(ours))


def _small(folder: Path) -> Iterator[Contender]:
    reference = "small JPEG, torchvision"
    files = ImageFolder(str(folder / "train"), _default(32, 3))
    loader = DataLoader(files, BATCH, shuffle=True)
    yield Contender(reference, reference, lambda: _inputs(loader))
    for cache in ("none", "ram", "disk"):
        for name in ("crop_flip", "on_device"):
            words = (f"transforms={name}", "data.image_size=32", f"data.cache={cache}")
            title = "small JPEG" if cache == "none" else f"small JPEG, cache={cache}"
            yield Contender(f"{title}, {name}", reference, _passes(_ours(folder, *words)))


def _large(folder: Path) -> Iterator[Contender]:
    reference = "large, torchvision"
    parts: list[Any] = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()]
    transform = v1.Compose([*parts, v1.ToTensor(), v1.Normalize(MEAN, STD)])
    loader = DataLoader(
        ImageFolder(str(folder / "train"), transform),
        LARGE_BATCH,
        shuffle=True,
        num_workers=LARGE_WORKERS,
        persistent_workers=True,
    )
    yield Contender(reference, reference, lambda: _inputs(loader), LARGE_WORKERS)
    words = (f"loader.batch_size={LARGE_BATCH}", f"loader.num_workers={LARGE_WORKERS}")
    ours = _ours(folder, "transforms=imagenet", *words)
    yield Contender("large JPEG, imagenet", reference, _passes(ours), LARGE_WORKERS)


def _default(side: int, channels: int) -> Callable[[Any], Tensor]:
    """Return what torchvision's own recipes do to small images."""
    normalize = v1.Normalize(MEAN[:channels], STD[:channels])
    crop: list[Any] = [v1.RandomCrop(side, padding=4), v1.RandomHorizontalFlip()]
    whole: Callable[[Any], Tensor] = v1.Compose([*crop, v1.ToTensor(), normalize])
    return whole


def _ours(folder: Path, *overrides: str) -> OnDevice:
    config = _config(f"data.root={folder}", "data=image_folder", "data.val_fraction=0", *overrides)
    return train_loader(config, build_data(config, ("train",)), _alone())


def ours_in_memory(images: Tensor, *overrides: str, targets: Tensor | None = None) -> OnDevice:
    """Build the loader of the configuration over images in memory (classes: all 0 if not given)."""
    channels = images.shape[1]
    statistics_ = [
        f"data.{name}={list(v[:channels])}" for name, v in (("mean", MEAN), ("std", STD))
    ]
    size = (f"data.image_size={images.shape[-1]}", f"data.channels={channels}")
    config = _config("data=digits", *overrides, *statistics_, *size)
    pipeline = build_pipeline(config, "train")
    defer(pipeline, "train")
    if targets is None:
        targets = torch.zeros(len(images), dtype=torch.int64)
    dataset = ImageTensors(images, targets, ["picture"], pipeline)
    return train_loader(config, Data({"train": dataset}, 1), _alone())


def _config(*overrides: str) -> Any:
    return parse(compose(["experiment=resnet18", f"loader.batch_size={BATCH}", *overrides]).config)


def _alone() -> Any:
    group = SimpleNamespace(rank=0, world_size=1)
    return SimpleNamespace(group=group, device=torch.device("cpu"))


def _passes(loader: OnDevice) -> Callable[[], Iterator[Tensor]]:
    """Return a function that begins the loader's next epoch each time."""
    epochs = iter(range(1_000_000))

    def batches() -> Iterator[Tensor]:
        for micro_batch in loader.epoch(next(epochs)):
            yield micro_batch.batch[0]

    return batches


def _inputs(loader: Iterable[Any]) -> Iterator[Tensor]:
    for inputs, _ in loader:
        yield inputs


def _rate(contender: Contender) -> float:
    clock = time.perf_counter if contender.workers else time.process_time
    since, images = clock(), 0
    for inputs in contender.batches():
        assert inputs.dtype == torch.float32
        images += len(inputs)
    return images / (clock() - since)


def _row(contender: Contender, rates: dict[str, list[float]]) -> Row:
    own, others = rates[contender.name], rates[contender.reference]
    ratio = statistics.median(a / b for a, b in zip(own, others, strict=True))
    middle = statistics.median(own)
    return Row(contender.name, middle, min(own), max(own), ratio, contender.reference)


def _folder(name: str, scratch: Path, side: int, images: int) -> tuple[Path, bool]:
    """Return a folder with `train/<class>/*` of JPEG files, and whether they are made up."""
    tree = scratch / f"pictures{side}"
    place = tree / "train" / "pictures"
    place.mkdir(parents=True)
    real = sorted(_real(name))[:: max(1, len(list(_real(name))) // images)][:images]
    for number, path in enumerate(real):
        (place / f"{number:05d}.jpg").symlink_to(path.absolute())
    if not real:
        for number, picture in enumerate(pictures(images, side, 3)):
            image = Image.fromarray(picture[:, : side * 3 // 4 or side].permute(1, 2, 0).numpy())
            image.save(place / f"{number:05d}.jpg", quality=90)
    return tree, not real


def _real(name: str) -> Iterator[Path]:
    root = Path(os.environ.get("DATA_ROOT", "datasets")) / name
    yield from (path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def pictures(samples: int, side: int, channels: int) -> Tensor:
    """Return images with detail at several scales, about as costly to decode as photographs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(samples):
        total = torch.zeros(channels, side, side)
        for part in (32, 8, 2, 1):
            small = (1, channels, -(-side // part), -(-side // part))
            noise = torch.rand(small, generator=generator)
            total += interpolate(noise, (side, side), mode="bilinear")[0] * (0.2 + part / 64)
        made.append((total / total.max() * 255).byte())
    return torch.stack(made)
