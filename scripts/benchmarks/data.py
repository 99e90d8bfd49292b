"""What data loading costs: our transforms by name, against torchvision's default for each sample.

Images in memory, small JPEG files, JPEG files of ImageNet's size, and photographs. Every loader
is built from the shipped YAML. Its reference is `ImageFolder`, or images in memory as torchvision's
`CIFAR10` has them, with Pillow and `torchvision.transforms`, sample by sample, and as many workers.

A rate is that of whole passes, by the CPU's time of this process and its workers, which other
processes change least; of large JPEG files also by the clock. The first pass is not counted: it
starts workers, warms the file cache and fills ours. Images are taken from `$DATA_ROOT` where
`cifar10/train` and `imagenet` are there; else they are made up, about as large. Photographs are
some of the large ones, enlarged.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from conf.check import parse
from data.decode import read_image
from data.formats.jpeg import region_decoder
from data.images import ImageTensors
from data.loading.batch_forms import defer
from data.loading.on_device import OnDevice
from data.transforms import Standardize, ToFloat
from scripts.benchmarks.image_files import enlarged, image_folder, pictures
from scripts.benchmarks.report import Report, Row, one_thread, paired
from scripts.composition.compose import compose
from trainer.build.data import Data, build_data, build_pipeline, train_loader

BATCH = 128
IN_MEMORY, SMALL, LARGE = 4000, 2000, 300  # images of a pass
LARGE_BATCH, LARGE_WORKERS = 64, 2
PHOTOGRAPHS = 12
LEAST = 0.3  # seconds of CPU time a rate is taken over
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

CLOCK = "by the clock: "

Sample = tuple[Tensor, int]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that yields batches of images for a pass."""

    name: str
    reference: str
    batches: Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Rate:
    """Images a second of CPU time, and of the clock's."""

    cpu: float
    clock: float


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
        small, made_small = image_folder("cifar10/train", Path(folder), 32, SMALL)
        large, made_large = image_folder("imagenet", Path(folder), 500, LARGE)
        photographs = enlarged(large, Path(folder) / "photographs", PHOTOGRAPHS)
        contenders = [*_memory(), *_small(small), *_large(large), *_photographs(photographs)]
        rates: dict[str, list[Rate]] = {contender.name: [] for contender in contenders}
        for turn in range(rounds + 1):
            for contender in contenders:
                rate = _rate(contender)
                if turn:
                    rates[contender.name].append(rate)
    rows = [_row(contender, rates, "cpu") for contender in contenders]
    rows += [_row(each, rates, "clock") for each in contenders if each.name.startswith("large")]
    ratios = {row.name: row.ratio for row in rows if row.name != row.reference}
    large_ones = {"large_jpeg": "decode=full", "large_jpeg_by_hand": "by hand"}
    if region_decoder():
        large_ones["large_jpeg_region"] = "decode=region"
    return Report(
        name="data",
        title="Loading and transforming images, one thread in the main process",
        unit="images/s",
        rows=rows,
        headlines={
            "ratio_to_reference": _least(ratios, "in memory"),
            "small_jpeg_cached": _least(ratios, "small JPEG, cache"),
            **{name: ratios[f"large JPEG, {row}"] or 0.0 for name, row in large_ones.items()},
            **{
                f"{name}_by_the_clock": ratios[f"{CLOCK}large JPEG, {row}"] or 0.0
                for name, row in large_ones.items()
            },
            "large_jpeg_cached": _least(ratios, "large JPEG, cache"),
            "photographs_scaled": _least(ratios, "photographs, decode=scaled"),
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
    plain = _plain(folder)
    yield Contender(reference, reference, lambda: _inputs(plain))
    by_hand = _loaded_by_hand(folder)
    standardize = Standardize(list(MEAN), list(STD)).after(ToFloat())
    yield Contender("large JPEG, by hand", reference, lambda: map(standardize, _inputs(by_hand)))
    words = ("transforms=imagenet", *_with_workers())
    for how in ("full", "region") if region_decoder() else ("full",):
        ours = _passes(_ours(folder, *words, f"data.decode={how}"))
        yield Contender(f"large JPEG, decode={how}", reference, ours)
    cached = _ours(folder, *words, "data.cache=ram")
    yield Contender("large JPEG, cache=ram, imagenet", reference, _passes(cached))


def _photographs(folder: Path) -> Iterator[Contender]:
    reference = "photographs, torchvision"
    plain = _plain(folder)
    yield Contender(reference, reference, lambda: _inputs(plain))
    for how in ("full", "scaled"):
        words = ("transforms=imagenet", f"data.decode={how}", *_with_workers())
        ours = _passes(_ours(folder, *words))
        yield Contender(f"photographs, decode={how}", reference, ours)


def _with_workers() -> tuple[str, ...]:
    words = (f"batch_size={LARGE_BATCH}", f"num_workers={LARGE_WORKERS}", "persistent_workers=true")
    return tuple(f"loader.{word}" for word in words)


def _plain(folder: Path) -> DataLoader[Sample]:
    """Return torchvision's own recipe for ImageNet."""
    parts: list[Any] = [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip()]
    transform = v1.Compose([*parts, v1.ToTensor(), v1.Normalize(MEAN, STD)])
    return _many(ImageFolder(str(folder / "train"), transform))


def _loaded_by_hand(folder: Path) -> DataLoader[Sample]:
    """Return the quickest loader known of bytes: a slice of torchvision's own decoding, scaled."""

    def cut(image: Tensor) -> Tensor:
        top, left, tall, wide = v1.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        part = image[None, :, top : top + tall, left : left + wide]
        part = interpolate(part, (224, 224), mode="bilinear", antialias=True)[0]
        return part.flip(-1) if torch.rand(()) < 0.5 else part

    return _many(ImageFolder(str(folder / "train"), cut, loader=read_image))


def _many(files: ImageFolder) -> DataLoader[Sample]:
    return DataLoader(
        files, LARGE_BATCH, shuffle=True, num_workers=LARGE_WORKERS, persistent_workers=True
    )


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


def _rate(contender: Contender) -> Rate:
    since, began, images = _cpu_seconds(), time.perf_counter(), 0
    while images == 0 or _cpu_seconds() - since < LEAST:
        for inputs in contender.batches():
            assert inputs.dtype == torch.float32
            images += len(inputs)
    return Rate(images / (_cpu_seconds() - since), images / (time.perf_counter() - began))


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children, ended or (on Linux) running."""
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    for child in multiprocessing.active_children():
        path = Path(f"/proc/{child.pid}/stat")
        if path.exists():
            fields = path.read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _row(contender: Contender, rates: dict[str, list[Rate]], by: Literal["cpu", "clock"]) -> Row:
    own, others = (
        [getattr(rate, by) for rate in rates[name]]
        for name in (contender.name, contender.reference)
    )
    before = CLOCK if by == "clock" else ""
    return paired(before + contender.name, own, before + contender.reference, others)[0]
