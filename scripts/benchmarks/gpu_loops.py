"""Both loops over one network, and what `gpu` measures of them: speed, kernels, waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from data.batch import to_device
from models.resnet import ResNet
from scripts.benchmarks.gpu_runs import BY_HAND, OURS, Rig, jpeg_loaders
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


def batch_size(rig: Rig, name: str) -> int:
    """Return the images of an update."""
    return 2 if rig.small else 256 if name == "resnet50" else 512


def contenders(rig: Rig, name: str, side: int, classes: int) -> dict[str, Contender]:
    """Return both loops over one batch on the device, each with a network of its own."""
    side = 32 if rig.small else side
    shape = (batch_size(rig, name), 3, side, side)
    images = torch.randn(shape, device=rig.device).to(memory_format=torch.channels_last)
    batch = (images, torch.randint(classes, shape[:1], device=rig.device))
    batches = partial(OneBatch, batch)
    return {
        BY_HAND: _bare(rig, batches, name, classes),
        OURS: _trainer(rig, batches, name, classes),
    }


def from_files(rig: Rig, folder: Path) -> dict[str, Contender]:
    """Return both loops over JPEG files, the images one by one through the recipe for ImageNet."""
    by_hand, ours = jpeg_loaders(rig, folder, batch_size(rig, "resnet50"))
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
    compiled = torch.compile(model, dynamic=False, mode=rig.mode) if rig.mode else model
    fused = rig.device.type == "cuda"
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=fused)
    return model, optimizer, compiled  # type: ignore[return-value]


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


def speeds(
    rig: Rig, contenders: dict[str, Contender], batch: int, rounds: int
) -> dict[str, list[float]]:
    """Return images a second of each turn; the first turn, which compiles, is left out."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            since = rig.wait()
            run(rig.updates)
            if turn:
                speeds[name].append(rig.updates * batch / (rig.wait() - since))
    return speeds


def kernels(rig: Rig, run: Contender) -> float:
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
    found: int = sum(name.startswith(wanted) for name in names)
    if not found:
        raise RuntimeError("torch's profiler saw no kernel: it may not be allowed to here")
    return found


def host_waits(run: Contender) -> float:
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
