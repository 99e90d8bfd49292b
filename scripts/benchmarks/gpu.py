"""Training on a GPU, against the same written by hand: `python -m scripts.benchmark gpu`.

- `airbench94` (with `data.root=DIR` of CIFAR-10 as image files): seconds of all its epochs and the
  test, and accuracy, against a loop with its data on the device;
- `resnet18_cifar10` and a ResNet-50 at 224, bf16, channels_last, compiled, on one batch that stays
  on the device: images a second against a bare loop;
- kernels that an update launches, and how often the host waits for the device between log lines.

A first, uncounted turn compiles. `device=cpu limit=2 widths=small` tries all of it without a GPU.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from conf.check import parse
from conf.errors import ConfigError
from models.resnet import ResNet
from scripts.benchmarks.airbench_plain import train_by_hand
from scripts.benchmarks.report import Report, Row
from scripts.composition.compose import compose
from trainer.build.experiment import build
from trainer.options import Clipping, TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BY_HAND, OURS = "by hand", "Regimen"
Batch = tuple[Tensor, Tensor]
Contender = Callable[[int], object]  # applies so many updates


@dataclass(frozen=True, slots=True)
class Rig:
    """Where the benchmark runs, and how much of it."""

    device: torch.device
    root: Path | None
    updates: int  # of a turn
    small: bool  # a trial without a GPU

    def wait(self) -> float:
        """Return the time when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


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
        seconds, accuracies = _airbench(rig, rig.root, rounds)
        rows += _rows("airbench94, seconds", seconds)
        rows += _rows("airbench94, % of the test images", accuracies)
        headlines["airbench94_ratio_to_handwritten"] = _ratio(seconds)
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
    if unknown := given.keys() - {"data.root", "device", "limit", "widths"}:
        raise ConfigError(f"gpu does not know {', '.join(sorted(unknown))}: give data.root=DIR")
    device = torch.device(given.get("device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the benchmark gpu needs a GPU, and torch finds none here")
    root = Path(given["data.root"]).absolute() if "data.root" in given else None
    return Rig(device, root, int(given.get("limit", 50)), given.get("widths") == "small")


def _airbench(
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
    if rig.small:
        words += ["model.widths=[8,16,16]", "loader.batch_size=20", "trainer.max_epochs=2"]
        words += ["trainer.compile=false"]
    return parse(compose(words).config)


def _ours(rig: Rig, root: Path) -> tuple[float, float]:
    experiment = build(_airbench_config(rig, root), Strategy(rig.device))
    trainer = experiment.trainer
    for split in ("train", "test"):
        experiment.data.sets[split].fill_cache(lambda: False)  # decoding is not compared
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


def _batch_size(rig: Rig, name: str) -> int:
    return 2 if rig.small else 256 if name == "resnet50" else 512


def _contenders(rig: Rig, name: str, side: int, classes: int) -> dict[str, Contender]:
    """Return both loops over one batch on the device, each with a network of its own."""
    side = 32 if rig.small else side
    shape = (_batch_size(rig, name), 3, side, side)
    images = torch.randn(shape, device=rig.device).to(memory_format=torch.channels_last)
    batch = (images, torch.randint(classes, shape[:1], device=rig.device))
    return {BY_HAND: _bare(rig, batch, name, classes), OURS: _trainer(rig, batch, name, classes)}


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
    return model, optimizer, model if rig.small else torch.compile(model, dynamic=False)  # type: ignore[return-value]


def _bare(rig: Rig, batch: Batch, name: str, classes: int) -> Contender:
    """Return a loop with the clipping and the running sums that ours has."""
    model, optimizer, compiled = _network(rig, name, classes)
    parameters = list(model.parameters())

    def run(updates: int) -> None:
        images, labels = batch
        sums = torch.zeros(3, device=rig.device)
        for _ in range(updates):
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


def _trainer(rig: Rig, batch: Batch, name: str, classes: int) -> Contender:
    model, optimizer, compiled = _network(rig, name, classes)
    options = TrainerOptions(
        max_epochs=1, channels_last=True, log_every_n_steps=10**9, clipping=Clipping(1.0)
    )

    def run(updates: int) -> None:
        Trainer(
            model,
            Classification(classes),
            optimizer,
            OneBatch(batch, updates),
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
    wanted = ("cudaLaunchKernel", "cuLaunchKernel") if on_gpu else ("aten::",)
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
