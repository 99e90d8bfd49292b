"""CIFAR-10 on a CPU by a loop as written in an afternoon: what `experiment=cifar10_fast` is beside.

Convolutions of random initial weights, SGD with Nesterov momentum and one cycle, label smoothing,
crops and flips, bf16 and channels_last; the test takes the mean with the mirror image.
`python -m examples.airbench.by_hand DIR` trains on DIR/train/<class>/* and prints the share of the
images of DIR/test/<class>/* that it gets right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import OneCycleLR

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)


def train_by_hand(
    root: Path,
    epochs: int = 4,
    batch: int = 500,
    widths: tuple[int, int, int] = (32, 128, 128),
    lr: float = 0.5,
) -> float:
    """Train and return the share of the test images that the mean of two views gets right."""
    torch.manual_seed(0)
    images, labels = _read(root / "train")
    model = _network(widths, int(labels.max()) + 1).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    updates = len(images) // batch
    scheduler = OneCycleLR(optimizer, lr, total_steps=updates * epochs)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(images))[: updates * batch].split(batch):  # type: ignore[no-untyped-call]
            inputs = _normalized(_augmented(images[rows]))
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
            loss = cross_entropy(outputs.float(), labels[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / updates:.3f}", file=sys.stderr, flush=True)
    return _tested(model, *_read(root / "test"))


def _read(folder: Path) -> tuple[Tensor, Tensor]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(path, n) for n, place in enumerate(classes) for path in sorted(place.iterdir())]
    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(lambda file: np.array(Image.open(file[0])), files)))
    labels = torch.tensor([label for _, label in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


def _network(widths: Sequence[int], classes: int) -> nn.Sequential:
    channels = [24, *widths]
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 2), nn.GELU()]
    for before, width in zip(channels, widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.MaxPool2d(2)]
        layers += [nn.BatchNorm2d(width), nn.GELU()]
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.GELU()]
    head = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers, *head)


def _augmented(images: Tensor) -> Tensor:
    """Move each image by up to two pixels, and mirror half of them."""
    samples, side = len(images), images.shape[-1]
    padded = pad(images.float(), (2, 2, 2, 2), mode="reflect")
    top, left = torch.randint(5, (2, samples, 1))
    rows, columns = top + torch.arange(side), left + torch.arange(side)
    columns = torch.where(torch.rand(samples, 1) < 0.5, columns.flip(1), columns)
    which = torch.arange(samples)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def _normalized(images: Tensor) -> Tensor:
    return ((images.float() / 255 - MEAN) / STD).contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def _tested(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    hits = 0
    for part, wanted in zip(images.split(1000), labels.split(1000), strict=True):  # type: ignore[no-untyped-call]
        inputs = _normalized(part)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs) + model(inputs.flip(3))
        hits += int((outputs.argmax(1) == wanted).sum())
    return hits / len(labels)


if __name__ == "__main__":
    print(train_by_hand(Path(sys.argv[1])))
