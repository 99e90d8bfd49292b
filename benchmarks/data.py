"""What data loading costs: our transforms by name, against torchvision's default for each sample.

Images in memory, small JPEG files, JPEG files of ImageNet's size, and photographs. Every loader
is built from the shipped YAML. Its reference is `ImageFolder`, or images in memory as torchvision's
`CIFAR10` has them, with Pillow and `torchvision.transforms`, sample by sample, and as many workers.

A rate is that of whole passes, by the CPU's time of this process and its workers, which other
processes change least. The first pass is not counted: it starts workers, warms the file cache and
fills ours. Images are taken from `$DATA_ROOT` where `cifar10/train` and `imagenet` are there; else
they are made up, about as large. Photographs are some of the large ones, enlarged.
"""

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image

from benchmarks import report
from benchmarks.report import Cost, Report
from regimen.conf.check import parse
from regimen.data.loading.device_transforms import defer
from regimen.data.loading.loader import CPU, Loader
from regimen.data.sources import ImageTensors
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import Data, build_data, build_pipeline
from regimen.trainer.assembly.loaders import train_loader
from regimen.trainer.strategies.strategy import Strategy

BATCH = 128
IN_MEMORY, SMALL, LARGE, PHOTOGRAPHS = 4000, 2000, 300, 12  # images of a pass
LARGE_BATCH, WORKERS = 64, 2  # of large files
TELEPHONE = 4000, 3000  # width and height of its photographs
LEAST = 0.3  # seconds of CPU time a rate is taken over
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
IMAGENET = v1.Compose(
    [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
)
IMAGENET = v1.Compose(
    [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
)

Passes = Callable[[], Iterable[Tensor]]  # begins a pass: batches of images
Transform = Callable[[Any], Tensor]


class InMemory(Dataset[tuple[Tensor, int]]):
    """Images in memory, made into a Pillow image for each access, as torchvision's `CIFAR10`."""

    def __init__(self, images: Tensor, transform: Transform) -> None:
        self.images = images.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), 0


def data(rounds: int) -> Report:
    """Let every contender make a pass `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        passes, made_up = _contenders(Path(folder))
        runs = {name: partial(_rate, each) for name, each in passes.items()}
        clocked, rates = report.split(report.in_turn(runs, rounds))
    own = [name for name in passes if not name.endswith(": torchvision")]
    to = {name: f"{name.partition(':')[0]}: torchvision" for name in own}
    clock, ratios = (report.ratios(each, to) for each in (clocked, rates))

    def least(*starts: str) -> float:
        return min(ratio for name, ratio in ratios.items() if name.startswith(starts))

    return Report(
        "Loading and transforming images, one thread in the main process",
        "images/s",
        rates,
        {
            "ratio_to_reference": least("digits", "CIFAR-sized"),
            "small_jpeg_cached": least("small JPEG: cache"),
            "large_jpeg": ratios["large JPEG: decode=full"],
            "large_jpeg_by_hand": ratios["large JPEG: by hand"],
            "large_jpeg_by_the_clock": clock["large JPEG: decode=full"],
            "large_jpeg_by_hand_by_the_clock": clock["large JPEG: by hand"],
            "large_jpeg_cached": least("large JPEG: cache"),
            "photographs_scaled": least("photographs: decode=scaled"),
        },
        to,
        {"made_up": made_up},
    )


def _contenders(scratch: Path) -> tuple[dict[str, Passes], dict[str, bool]]:
    """Return the contenders by kind of images and name, and which images are made up."""
    small, made_small = picture_folder("cifar10/train", scratch / "small", 32, SMALL)
    large, made_large = picture_folder("imagenet", scratch / "large", 500, LARGE)
    photographs = scratch / "photographs"
    (place := photographs / "train" / "pictures").mkdir(parents=True)
    for path in sorted((large / "train" / "pictures").iterdir())[:PHOTOGRAPHS]:
        photograph = Image.open(path).convert("RGB").resize(TELEPHONE, Image.Resampling.BICUBIC)
        photograph.save(place / path.name, quality=92)
    found = {
        **_memory("digits", made_up(IN_MEMORY, 16, 1), "shift"),
        **_memory("CIFAR-sized", made_up(IN_MEMORY, 32, 3), "crop_flip", "on_device"),
        "small JPEG: torchvision": _files(small, _padded_crop(32, 3), BATCH, 0),
        "large JPEG: torchvision": _files(large, IMAGENET, LARGE_BATCH, WORKERS),
        "large JPEG: by hand": _by_hand(large),
        "photographs: torchvision": _files(photographs, IMAGENET, LARGE_BATCH, WORKERS),
    }
    words = ["data.image_size=32", f"loader.batch_size={BATCH}"]
    for cache, name in itertools.product(("none", "ram", "disk"), ("crop_flip", "on_device")):
        title = name if cache == "none" else f"cache={cache}, {name}"
        how = (f"transforms={name}", f"data.cache={cache}", *words)
        found[f"small JPEG: {title}"] = _passes(ours_of_files(small, *how))
    words = [f"loader.batch_size={LARGE_BATCH}", f"loader.num_workers={WORKERS}"]
    words += ["loader.persistent_workers=true", "transforms=imagenet"]
    for word in ("decode=full", "cache=ram"):
        found[f"large JPEG: {word}"] = _passes(ours_of_files(large, f"data.{word}", *words))
    for word in ("decode=full", "decode=scaled"):
        found[f"photographs: {word}"] = _passes(ours_of_files(photographs, f"data.{word}", *words))
    return found, {"small": made_small, "large": made_large}


def _memory(kind: str, images: Tensor, *names: str) -> dict[str, Passes]:
    crop = _padded_crop(images.shape[-1], images.shape[1])
    found = {f"{kind}: torchvision": _plain(InMemory(images, crop), BATCH, 0)}
    for name in names:
        words = (f"transforms={name}", f"loader.batch_size={BATCH}")
        found[f"{kind}: {name}"] = _passes(ours_in_memory(images, *words))
    return found


def _padded_crop(side: int, channels: int) -> Any:
    crop = [v1.RandomCrop(side, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor()]
    return v1.Compose([*crop, v1.Normalize(MEAN[:channels], STD[:channels])])


def _plain(dataset: Dataset[Any], batch: int, workers: int) -> Passes:
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(dataset, batch, shuffle=True, **options)
    return lambda: (inputs for inputs, _ in loader)


def _files(folder: Path, transform: Transform, *batches: int, **options: Any) -> Passes:
    return _plain(ImageFolder(f"{folder}/train", transform, **options), *batches)


def _by_hand(folder: Path) -> Passes:
    """Return the quickest loader known of bytes: a slice of torchvision's own decoding, scaled."""

    def cut(image: Tensor) -> Tensor:
        top, left, tall, wide = v1.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        part = image[None, :, top : top + tall, left : left + wide]
        part = interpolate(part, (224, 224), mode="bilinear", antialias=True)[0]
        return part.flip(-1) if torch.rand(()) < 0.5 else part

    decode = partial(decode_image, mode=ImageReadMode.RGB)
    batches = _files(folder, cut, LARGE_BATCH, WORKERS, loader=decode)
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (MEAN, STD))
    return lambda: (batch.float().sub_(mean).div_(std) for batch in batches())


def ours_of_files(folder: Path, *overrides: str, device: torch.device = CPU) -> Loader:
    """Build the loader of the configuration over picture files."""
    words = (f"data.root={folder}", "data=image_folder", "data.val_fraction=0", *overrides)
    config = parse(compose(["experiment=resnet18", *words]).config)
    return train_loader(config, build_data(config, ("train",)), Strategy(device))


def ours_in_memory(images: Tensor, *overrides: str, targets: Tensor | None = None) -> Loader:
    """Build the loader of the configuration over images in memory (classes: all 0 if not given)."""
    channels, side = images.shape[1], images.shape[-1]
    words = [f"data.{name}={list(v[:channels])}" for name, v in (("mean", MEAN), ("std", STD))]
    words += [f"data.image_size={side}", f"data.channels={channels}"]
    config = parse(compose(["experiment=resnet18", "data=digits", *overrides, *words]).config)
    pipeline = build_pipeline(config, "train")
    defer(pipeline, "train")
    targets = torch.zeros(len(images), dtype=torch.int64) if targets is None else targets
    dataset = ImageTensors(images, targets, ["picture"], pipeline)
    return train_loader(config, Data({"train": dataset}, 1), Strategy("cpu"))


def _passes(loader: Loader) -> Passes:
    epochs = itertools.count()
    return lambda: (micro_batch.batch[0] for micro_batch in loader.epoch(next(epochs)))


def _rate(passes: Passes) -> Cost:
    """Return images a second, by the clock and by the CPU's time."""
    since, began, images = _cpu_seconds(), time.perf_counter(), 0
    while images == 0 or _cpu_seconds() - since < LEAST:
        for inputs in passes():
            assert inputs.dtype == torch.float32
            images += len(inputs)
    return Cost(images / (time.perf_counter() - began), images / (_cpu_seconds() - since))


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children, ended or (on Linux) running."""
    seconds = time.process_time() + report.children_cpu()
    for child in multiprocessing.active_children():
        path = Path(f"/proc/{child.pid}/stat")
        if path.exists():
            fields = path.read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def picture_folder(name: str, tree: Path, side: int, images: int) -> tuple[Path, bool]:
    """Return a folder with `train/<class>/*` of JPEG files, and whether they are made up."""
    (place := tree / "train" / "pictures").mkdir(parents=True)
    root = Path(os.environ.get("DATA_ROOT", "datasets")) / name
    real = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    for number, path in enumerate(real[:: max(1, len(real) // images)][:images]):
        (place / f"{number:05d}.jpg").symlink_to(path.absolute())
    if not real:
        for number, picture in enumerate(made_up(images, side, 3)):
            image = Image.fromarray(picture[:, : side * 3 // 4].permute(1, 2, 0).numpy())
            image.save(place / f"{number:05d}.jpg", quality=90)
    return tree, not real


def made_up(samples: int, side: int, channels: int) -> Tensor:
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
