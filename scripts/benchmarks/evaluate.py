"""What an evaluation costs beside its network: ours, and a bare `inference_mode` loop.

Both read the same loader: images of CIFAR's size, bytes in memory that are standardized. Both give
loss and accuracy. Rates are by the CPU's time with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from data.loading.on_device import OnDevice
from models.resnet import ResNet
from models.small_cnn import SmallCNN
from scripts.benchmarks.data import ours_in_memory
from scripts.benchmarks.report import Report, one_thread, paired
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH = 128
MOST_ROUNDS = 12  # ten seconds or more each
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and batches of a pass
    "small_cnn": (partial(SmallCNN, num_classes=10, in_channels=3), 10),
    "resnet18": (partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar"), 2),
}

Pass = Callable[[Trainer, OnDevice], object]


def measure(rounds: int) -> Report:
    """Evaluate `rounds` times, at most 12, in each way, in turn, with each network, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    rows, ratios = [], {}
    for network, (make, batches) in NETWORKS.items():
        rates: dict[Pass, list[float]] = {_bare: [], _regimen: []}
        with one_thread():
            for turn, (way, rate) in _turns(rounds, make(), batches):
                if turn:  # the first warms up
                    rates[way].append(rate)
        reference = f"bare loop, {network}"
        bare, ours = rates[_bare], rates[_regimen]
        rows.append(paired(reference, bare, reference, bare)[0])
        row, ratios[network] = paired(f"Regimen, {network}", ours, reference, bare)
        rows.append(row)
    return Report(
        name="evaluate",
        title=f"Evaluating images of 32 x 32 in batches of {BATCH}, one thread",
        unit="images/s",
        rows=rows,
        headlines={
            "ratio_to_reference": ratios["resnet18"],
            **{f"ratio_to_reference_{network}": ratio for network, ratio in ratios.items()},
        },
        settings={"rounds": rounds, "batches": {k: n for k, (_, n) in NETWORKS.items()}},
    )


def _turns(rounds: int, model: nn.Module, batches: int) -> Iterator[tuple[int, tuple[Pass, float]]]:
    images = torch.randint(256, (batches * BATCH, 3, 32, 32), dtype=torch.uint8)
    words = ("transforms=basic", f"loader.batch_size={BATCH}")
    loader = ours_in_memory(images, *words, targets=torch.arange(len(images)) % 10)
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, Classification(num_classes=10), optimizer, loader)
    for turn in range(rounds + 1):
        for way in (_bare, _regimen):
            model.train()
            since = time.process_time()
            way(trainer, loader)
            yield turn, (way, len(images) / (time.process_time() - since))


def _regimen(trainer: Trainer, loader: OnDevice) -> dict[str, float]:
    return trainer.evaluate(loader, "val")


@torch.inference_mode()
def _bare(trainer: Trainer, loader: OnDevice) -> tuple[float, float]:
    trainer.model.eval()
    losses, hits, seen = 0.0, 0, 0
    for micro_batch in loader.epoch(0):
        inputs, labels = micro_batch.batch
        logits: Tensor = trainer.model(inputs)
        losses += cross_entropy(logits, labels, reduction="sum").item()
        hits += int((logits.argmax(1) == labels).sum().item())
        seen += len(labels)
    return losses / seen, hits / seen
