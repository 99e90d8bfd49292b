"""What a run of ResNet-18 costs beside its network: our Trainer, and a bare loop over tensors.

Images of CIFAR's size. Ours are bytes in memory that are cropped, flipped and standardized, with
bar, TensorBoard, metrics and a log line every three updates. The bare loop indexes images that are
ready, and does nothing else. Rates are by the CPU's time with one thread, from the first update to
the last. Checkpoints have a benchmark of their own.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from callbacks.lr_monitor import LRMonitor
from callbacks.metrics_log import MetricsLog
from callbacks.progress import Progress
from callbacks.tensorboard import TensorBoard
from models.resnet import ResNet
from scripts.benchmarks.data import ours_in_memory
from scripts.benchmarks.report import Report, one_thread, paired
from scripts.benchmarks.step import _quiet_terminal
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

UPDATES, BATCH, LOG = 7, 32, 3  # the first update is not counted
MOST_ROUNDS = 5  # half a minute or more each
FORMS = {
    "fp32": ("fp32", False),
    "fp32, channels_last": ("fp32", True),
    "bf16": ("bf16", False),
    "bf16, channels_last": ("bf16", True),
}

network = partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar")


@dataclass(slots=True)
class Clock(Callback):
    """Note the CPU's time after each update."""

    stamps: list[float] = field(default_factory=list)

    def on_update_end(self, trainer: Trainer) -> None:
        """Note it."""
        self.stamps.append(time.process_time())

    def rate(self) -> float:
        """Return images a second, from the first update to the last."""
        return (len(self.stamps) - 1) * BATCH / (self.stamps[-1] - self.stamps[0])


def measure(rounds: int) -> Report:
    """Train `rounds` times, at most 5, in each form and way, in turn, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    images = torch.randint(256, (UPDATES * BATCH, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    rates: dict[str, tuple[list[float], list[float]]] = {form: ([], []) for form in FORMS}
    with one_thread(), _quiet_terminal():
        for _ in range(rounds):
            for form, (ours, bare) in rates.items():
                bare.append(_bare(form, images, labels))
                ours.append(_regimen(form, images, labels))
    rows, ratios = [], {}
    for form, (ours, bare) in rates.items():
        reference = f"bare loop, {form}"
        rows.append(paired(reference, bare, reference, bare)[0])
        row, ratios[form] = paired(f"Regimen, {form}", ours, reference, bare)
        rows.append(row)
    return Report(
        name="train",
        title="ResNet-18 on images of 32 x 32, one thread",
        unit="images/s",
        rows=rows,
        headlines={"ratio_to_reference": ratios["fp32"], "least_ratio": min(ratios.values())},
        settings={"rounds": rounds, "updates": UPDATES, "batch": BATCH},
    )


def _model(channels_last: bool) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = network().to(memory_format=layout)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def _bare(form: str, images: Tensor, labels: Tensor) -> float:
    precision, channels_last = FORMS[form]
    model, optimizer = _model(channels_last)
    ready = images.float().div_(255).sub_(0.5).div_(0.25)
    if channels_last:
        ready = ready.contiguous(memory_format=torch.channels_last)
    clock = Clock()
    for rows in torch.split(torch.randperm(len(ready)), BATCH):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy(model(ready[rows]), labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        clock.stamps.append(time.process_time())
    return clock.rate()


def _regimen(form: str, images: Tensor, labels: Tensor) -> float:
    precision, channels_last = FORMS[form]
    model, optimizer = _model(channels_last)
    loader = ours_in_memory(
        images, "transforms=crop_flip", f"loader.batch_size={BATCH}", targets=labels
    )
    clock = Clock()
    callbacks: dict[str, Callback] = {
        "progress": Progress(),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
        "metrics_log": MetricsLog(),
        "clock": clock,
    }
    options = TrainerOptions(max_steps=UPDATES, log_every_n_steps=LOG, channels_last=channels_last)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(loader):
        Trainer(
            model,
            Classification(num_classes=10),
            optimizer,
            loader,
            precision=precision,
            callbacks=callbacks,
            options=options,
            run_dir=Path(folder),
        ).fit()
    return clock.rate()
