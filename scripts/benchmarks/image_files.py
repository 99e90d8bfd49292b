"""Images that the benchmarks load: real ones of `$DATA_ROOT`, or some that are made up."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

_PHOTOGRAPH = 4000, 3000  # width and height of those of a telephone


def image_folder(name: str, scratch: Path, side: int, images: int) -> tuple[Path, bool]:
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


def enlarged(folder: Path, tree: Path, images: int) -> Path:
    """Write a few images of a folder again, as large as those of a telephone."""
    place = tree / "train" / "pictures"
    place.mkdir(parents=True)
    for path in sorted((folder / "train" / "pictures").iterdir())[:images]:
        with Image.open(path) as image:
            large = image.convert("RGB").resize(_PHOTOGRAPH, Image.Resampling.BICUBIC)
        large.save(place / path.name, quality=92)
    return tree


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
