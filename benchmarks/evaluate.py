"""What an evaluation costs beside its network: ours, and a bare `inference_mode` loop.

Both read the same loader: images of CIFAR's size, bytes in memory that are standardized. Both give
loss and accuracy. Rates are by the CPU's time with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks import report
from benchmarks.data import ours_in_memory
from benchmarks.report import Report
from data.loading.loader import Loader
from models.resnet import ResNet
from models.small_cnn import SmallCNN
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH = 128
MOST_ROUNDS = 12  # ten seconds or more each
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and batches of a pass
    "small_cnn": (partial(SmallCNN, num_classes=10, in_channels=3), 10),
    "resnet18": (partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar"), 2),
}


@torch.inference_mode()
def bare(trainer: Trainer, loader: Loader) -> dict[str, float]:
    """Evaluate by hand."""
    trainer.model.eval()
    losses, hits, seen = 0.0, 0, 0
    for micro_batch in loader.epoch(0):
        inputs, labels = micro_batch.batch
        logits: Tensor = trainer.model(inputs)
        losses += cross_entropy(logits, labels, reduction="sum").item()
        hits += int((logits.argmax(1) == labels).sum().item())
        seen += len(labels)
    return {"val/loss": losses / seen, "val/accuracy": hits / seen}


def ours(trainer: Trainer, loader: Loader) -> dict[str, float]:
    """Evaluate by a Trainer."""
    return trainer.evaluate(loader, "val")


def measure(rounds: int) -> Report:
    """Evaluate `rounds` times, at most 12, in each way, in turn, with each network, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    rates: dict[str, list[float]] = {}
    for network, (make, batches) in NETWORKS.items():
        trainer, loader = _parts(make(), batches)
        ways = {f"bare loop, {network}": bare, f"Regimen, {network}": ours}
        runs = {n: partial(_rate, way, trainer, loader, batches) for n, way in ways.items()}
        with report.one_thread():
            rates |= report.in_turn(runs, rounds)
    references = {f"Regimen, {name}": f"bare loop, {name}" for name in NETWORKS}
    ratios = {n: report.paired(rates[f"Regimen, {n}"], rates[f"bare loop, {n}"]) for n in NETWORKS}
    return Report(
        name="evaluate",
        title=f"Evaluating images of 32 x 32 in batches of {BATCH}, one thread",
        unit="images/s",
        rows=report.compared(rates, references),
        headlines={
            "ratio_to_reference": ratios["resnet18"],
            **{f"ratio_to_reference_{network}": ratio for network, ratio in ratios.items()},
        },
        settings={"rounds": rounds, "batches": {k: n for k, (_, n) in NETWORKS.items()}},
    )


def _parts(model: nn.Module, batches: int) -> tuple[Trainer, Loader]:
    images = torch.randint(256, (batches * BATCH, 3, 32, 32), dtype=torch.uint8)
    words = ("transforms=basic", f"loader.batch_size={BATCH}")
    loader = ours_in_memory(images, *words, targets=torch.arange(len(images)) % 10)
    optimizer = SGD(model.parameters(), lr=0.1)
    return Trainer(model, Classification(num_classes=10), optimizer, loader), loader


def _rate(
    way: Callable[[Trainer, Loader], object], trainer: Trainer, loader: Loader, batches: int
) -> float:
    trainer.model.train()
    since = time.process_time()
    way(trainer, loader)
    return batches * BATCH / (time.process_time() - since)
