"""Training on a GPU, against the same written by hand: `python -m scripts.benchmark gpu`.

- `airbench94` (with `data.root=DIR` of CIFAR-10 as image files): seconds of all its epochs and the
  test, and accuracy, against a loop with its data on the device; `resnet18_cifar10` once, whole;
- `resnet18_cifar10` and a ResNet-50 at 224, bf16, channels_last, compiled, on one batch that stays
  on the device: images a second against a bare loop;
- the ResNet-50 from JPEG files of `$DATA_ROOT/imagenet` (or made-up ones), against torchvision's
  `ImageFolder` and a bare loop; `resnet50_jpeg_share_of_time` is the share of its time that the
  device does not wait for data: images a second by those of the batch that stays;
- kernels that an update launches, and how often the host waits for the device between log lines.

A first, uncounted turn compiles; `compile=reduce-overhead` compiles both sides in that mode of
torch's, with CUDA graphs. `device=cpu limit=2 widths=small` tries all of it without a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from conf.errors import ConfigError
from data.batch import to_device
from models.resnet import ResNet
from scripts.benchmarks.gpu_runs import (
    BY_HAND,
    OURS,
    Rig,
    airbench,
    jpeg_loaders,
    trained_whole,
)
from scripts.benchmarks.report import Report, Row
from trainer.options import Clipping, TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int], Any]  # gives a loader of so many batches, or of more
Contender = Callable[[int], object]  # applies so many updates


class OneBatch:
    """A loader that gives the same batch, already on its device, so many times."""

    def __init__(self, batch: Batch, updates: int) -> None:
        self.batch = batch
        self.updates = updates

    def __len__(self) -> int:
        return self.updates

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.updates):
            yield self.batch


def measure(rounds: int, overrides: Sequence[str] = ()) -> Report:
    """Run all comparisons, `rounds` turns each."""
    rig = _rig(overrides)
    rows: list[Row] = []
    headlines: dict[str, float] = {}
    if rig.root is not None:
        seconds, accuracies = airbench(rig, rig.root, rounds)
        rows += _rows("airbench94, seconds", seconds)
        rows += _rows("airbench94, % of the test images", accuracies)
        headlines["airbench94_ratio_to_handwritten"] = _ratio(seconds)
        took, share = trained_whole(rig, rig.root)
        headlines |= {"resnet18_cifar10_seconds": took, "resnet18_cifar10_accuracy": share}
    for name, side, classes in (("resnet18_cifar10", 32, 10), ("resnet50", 224, 1000)):
        contenders = _contenders(rig, name, side, classes)
        speeds = _speeds(rig, contenders, _batch_size(rig, name), rounds)
        rows += _rows(f"{name}, images/s", speeds)
        headlines[f"{name}_ratio_to_reference"] = _ratio(speeds)
        counts = {who: [_kernels(rig, run)] for who, run in contenders.items()}
        rows += _rows(f"{name}, kernels an update", counts)
        headlines[f"{name}_kernels_ratio_to_handwritten"] = _ratio(counts)
        if rig.device.type == "cuda":
            headlines[f"{name}_host_waits"] = _host_waits(contenders[OURS])
    with tempfile.TemporaryDirectory() as folder:
        from_files = _from_files(rig, Path(folder))
        fed = _speeds(rig, from_files, _batch_size(rig, "resnet50"), rounds)
    rows += _rows("resnet50 from JPEG files, images/s", fed)
    headlines["resnet50_jpeg_ratio_to_reference"] = _ratio(fed)
    alone = statistics.median(speeds[OURS])  # of the last network, the ResNet-50
    headlines["resnet50_jpeg_share_of_time"] = statistics.median(fed[OURS]) / alone
    return Report(
        name="gpu",
        title=f"Training on {rig.device}, against the same by hand",
        unit="value",
        rows=rows,
        headlines=headlines,
        settings={"rounds": rounds, "overrides": list(overrides), "updates": rig.updates},
    )


def _rig(overrides: Sequence[str]) -> Rig:
    given = dict(word.partition("=")[::2] for word in overrides)
    if unknown := given.keys() - {"data.root", "device", "limit", "widths", "compile"}:
        raise ConfigError(f"gpu does not know {', '.join(sorted(unknown))}: give data.root=DIR")
    device = torch.device(given.get("device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the benchmark gpu needs a GPU, and torch finds none here")
    root = Path(given["data.root"]).absolute() if "data.root" in given else None
    small, mode = given.get("widths") == "small", given.get("compile", "default")
    return Rig(device, root, int(given.get("limit", 50)), small, mode)


def _batch_size(rig: Rig, name: str) -> int:
    return 2 if rig.small else 256 if name == "resnet50" else 512


def _contenders(rig: Rig, name: str, side: int, classes: int) -> dict[str, Contender]:
    """Return both loops over one batch on the device, each with a network of its own."""
    side = 32 if rig.small else side
    shape = (_batch_size(rig, name), 3, side, side)
    images = torch.randn(shape, device=rig.device).to(memory_format=torch.channels_last)
    batch = (images, torch.randint(classes, shape[:1], device=rig.device))
    batches = partial(OneBatch, batch)
    return {
        BY_HAND: _bare(rig, batches, name, classes),
        OURS: _trainer(rig, batches, name, classes),
    }


def _from_files(rig: Rig, folder: Path) -> dict[str, Contender]:
    """Return both loops over JPEG files, the images one by one through the recipe for ImageNet."""
    by_hand, ours = jpeg_loaders(rig, folder, _batch_size(rig, "resnet50"))
    return {
        BY_HAND: _bare(rig, partial(islice, by_hand), "resnet50", 1000),
        OURS: _trainer(rig, lambda updates: ours, "resnet50", 1000),
    }


def _network(
    rig: Rig, name: str, classes: int
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """Return a network, its optimizer, and the network compiled."""
    torch.manual_seed(0)
    depth = 50 if name == "resnet50" and not rig.small else 18
    model = ResNet(depth, classes, stem="imagenet" if name == "resnet50" else "cifar")
    model = model.to(rig.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused = rig.device.type == "cuda"
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=fused)
    return (
        model,
        optimizer,
        model if rig.small else torch.compile(model, dynamic=False, mode=rig.mode),
    )  # type: ignore[return-value]


def _bare(rig: Rig, batches: Batches, name: str, classes: int) -> Contender:
    """Return a loop with the clipping and the running sums that ours has."""
    model, optimizer, compiled = _network(rig, name, classes)
    parameters = list(model.parameters())

    def run(updates: int) -> None:
        sums = torch.zeros(3, device=rig.device)
        for batch in batches(updates):
            images, labels = to_device(batch, rig.device, channels_last=True)
            with torch.autocast(rig.device.type, torch.bfloat16):
                outputs = compiled(images)
                loss = cross_entropy(outputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            hits = outputs.detach().argmax(1).eq(labels).sum()
            sums += torch.stack([loss.detach(), norm, hits])
        sums.tolist()

    return run


def _trainer(rig: Rig, batches: Batches, name: str, classes: int) -> Contender:
    model, optimizer, compiled = _network(rig, name, classes)

    def run(updates: int) -> None:
        options = TrainerOptions(
            max_steps=updates,
            channels_last=True,
            log_every_n_steps=10**9,
            clipping=Clipping(1.0),
        )
        Trainer(
            model,
            Classification(classes),
            optimizer,
            batches(updates),
            strategy=Strategy(rig.device),
            precision="bf16",
            options=options,
            compiled=compiled,
        ).fit()

    return run


def _speeds(
    rig: Rig, contenders: dict[str, Contender], batch: int, rounds: int
) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            since = rig.wait()
            run(rig.updates)
            if turn:
                speeds[name].append(rig.updates * batch / (rig.wait() - since))
    return speeds


def _kernels(rig: Rig, run: Contender) -> float:
    """Return how many kernels an update launches; on a CPU, how many operators it calls.

    What a run does once cancels out between runs of two lengths.
    """
    return (_launched(rig, run, 6) - _launched(rig, run, 2)) / 4


def _launched(rig: Rig, run: Contender, updates: int) -> int:
    on_gpu = rig.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as trace:
        run(updates)
    names = [event.name for event in trace.events()]
    wanted = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch") if on_gpu else ("aten::",)
    return sum(name.startswith(wanted) for name in names)


def _host_waits(run: Contender) -> float:
    """Return how often the host waits for the device in an update without a log line."""

    def waits(updates: int) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(updates)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    return (waits(6) - waits(2)) / 4


def _rows(title: str, values: dict[str, list[float]]) -> list[Row]:
    reference = f"{title}: {BY_HAND}"
    return [
        Row(
            f"{title}: {name}",
            statistics.median(own),
            min(own),
            max(own),
            None if name == BY_HAND else _ratio(values),
            "" if name == BY_HAND else reference,
        )
        for name, own in values.items()
    ]


def _ratio(values: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(values[OURS], values[BY_HAND], strict=True))
