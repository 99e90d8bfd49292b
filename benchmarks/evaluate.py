"""What an evaluation costs beside its network: ours, and a bare `inference_mode` loop.

Both read the same loader: images of CIFAR's size, bytes in memory that are standardized. Both give
loss and accuracy. Rates are by the CPU's time with one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks import report
from benchmarks.data import ours_in_memory
from benchmarks.report import BARE, OURS, Report
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
    torch.set_num_threads(1)
    for network, (make, batches) in NETWORKS.items():
        parts = _parts(make(), batches)
        ways = {f"{BARE}, {network}": bare, f"{OURS}, {network}": ours}
        runs = {
            n: partial(report.rate, batches * BATCH, partial(w, *parts)) for n, w in ways.items()
        }
        rates |= report.in_turn(runs, rounds)
    references = {f"{OURS}, {name}": f"{BARE}, {name}" for name in NETWORKS}
    ratios = {n: report.paired(rates[f"{OURS}, {n}"], rates[f"{BARE}, {n}"]) for n in NETWORKS}
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
