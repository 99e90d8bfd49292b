"""What a run of ResNet-18 costs beside its network: our Trainer, and a bare loop over tensors.

Images of CIFAR's size. Ours are bytes in memory that are cropped, flipped and standardized, with
bar, TensorBoard, metrics and a log line every three updates. The bare loop indexes images that are
ready, and does nothing else. The two train in turn within one process, three updates each, one
thread, by the CPU's time; a ratio is that of a turn. A checkpoint is saved at the end: its CPU
time, the writing beside the training included, is added as that of one save for 45,000 images, an
epoch of CIFAR-10. About four minutes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from callbacks.checkpoint import Checkpoint
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

BATCH, TURN = 32, 3  # images of an update; updates of one contender, then as many of the other
MOST_ROUNDS = 6  # turns of each form: half a minute for all forms together
EPOCH = 45_000  # images from one save to the next
FORMS = {
    "fp32": ("fp32", False),
    "fp32, channels_last": ("fp32", True),
    "bf16": ("bf16", False),
    "bf16, channels_last": ("bf16", True),
}

network = partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar")


@dataclass(slots=True)
class Turns(Callback):
    """Let the bare loop train after every `TURN` updates of ours; note the CPU seconds of both.

    The first turn of each is not counted.
    """

    bare: Callable[[], None]
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    began: float = 0.0

    def on_update_end(self, trainer: Trainer) -> None:
        """End a turn of ours, and do one of the bare loop."""
        if trainer.state.updates % TURN:
            return
        ended = time.process_time()
        for _ in range(TURN):
            self.bare()
        own, self.began = ended - self.began, time.process_time()
        if trainer.state.updates > TURN:
            self.ours.append(own)
            self.theirs.append(self.began - ended)


def measure(rounds: int) -> Report:
    """Train in each form for `rounds` turns, at most 6, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    images = torch.randint(256, ((rounds + 1) * TURN * BATCH, 3, 32, 32), dtype=torch.uint8)
    rows, ratios, saves = [], {}, []
    for form in FORMS:
        with one_thread(), _quiet_terminal():
            turns, save = _run(form, images, torch.arange(len(images)) % 10)
        share = save * TURN * BATCH / EPOCH
        ours = [TURN * BATCH / (seconds + share) for seconds in turns.ours]
        bare = [TURN * BATCH / seconds for seconds in turns.theirs]
        reference = f"bare loop, {form}"
        rows.append(paired(reference, bare, reference, bare)[0])
        row, ratios[form] = paired(f"Regimen, {form}", ours, reference, bare)
        rows.append(row)
        saves.append(save)
    return Report(
        name="train",
        title="ResNet-18 on images of 32 x 32, one thread",
        unit="images/s",
        rows=rows,
        headlines={"ratio_to_reference": ratios["fp32"], "least_ratio": min(ratios.values())},
        settings={
            "turns": rounds,
            "updates_of_a_turn": TURN,
            "batch": BATCH,
            "seconds_of_a_save": max(saves),
        },
    )


def _run(form: str, images: Tensor, labels: Tensor) -> tuple[Turns, float]:
    """Train both, and return their turns and the CPU seconds of the save at the end."""
    precision, channels_last = FORMS[form]
    model, optimizer = _model(channels_last)
    loader = ours_in_memory(
        images, "transforms=crop_flip", f"loader.batch_size={BATCH}", targets=labels
    )
    updates = _bare(form, images, labels)
    turns = Turns(lambda: next(updates))
    callbacks: dict[str, Callback] = {
        "progress": Progress(),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
        "metrics_log": MetricsLog(),
        "turns": turns,
        "checkpoint": Checkpoint(every_n_epochs=None, monitor=None),
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(loader):
        Trainer(
            model,
            Classification(num_classes=10),
            optimizer,
            loader,
            precision=precision,
            callbacks=callbacks,
            options=TrainerOptions(
                max_steps=len(images) // BATCH, log_every_n_steps=TURN, channels_last=channels_last
            ),
            run_dir=Path(folder),
        ).fit()
        return turns, time.process_time() - turns.began


def _bare(form: str, images: Tensor, labels: Tensor) -> Iterator[None]:
    """Train by hand, and stop after every update."""
    precision, channels_last = FORMS[form]
    model, optimizer = _model(channels_last)
    ready = images.float().div_(255).sub_(0.5).div_(0.25)
    if channels_last:
        ready = ready.contiguous(memory_format=torch.channels_last)
    for rows in torch.split(torch.randperm(len(ready)), BATCH):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy(model(ready[rows]), labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def _model(channels_last: bool) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = network().to(memory_format=layout)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
