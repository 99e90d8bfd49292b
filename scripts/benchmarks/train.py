"""What a run of ResNet-18 costs beside its network: our Trainer, and a bare loop over tensors.

Images of CIFAR's size. Ours are bytes in memory that are cropped, flipped and standardized, with
bar, TensorBoard, metrics and a log line every three updates. The bare loop indexes images that are
ready, and does nothing else. Each has a process of its own: with two models in one heap it is luck
which of them pays for the memory that the C library gives back to the system. Between processes it
is luck as well, so there are several pairs of them. In ours the C library keeps freed memory, as it
does in our commands. They train in turn, three updates each, one thread, by the CPU's time; a ratio
is that of a turn. A checkpoint is saved at the end: its CPU time, the writing beside the training
included, is added as that of one save for 45,000 images, an epoch of CIFAR-10. Four minutes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

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
from scripts.benchmarks.report import Report, paired
from scripts.benchmarks.step import _quiet_terminal
from scripts.cli.console import keep_freed_memory
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH, TURN = 32, 3  # images of an update; updates of one contender, then as many of the other
PAIRS = 3  # of processes for each form
START: Final = "spawn"  # a fork would copy this process's heap
MOST_ROUNDS = 2  # turns of a pair; with more the whole takes longer than four minutes
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
    """Stop after every turn, send its CPU seconds, and wait to be asked for the next.

    The first, with the first log line, is not counted.
    """

    asked: Connection
    began: float = 0.0

    def on_update_end(self, trainer: Trainer) -> None:
        """End a turn."""
        if trainer.state.updates % TURN == 0:
            self.asked.send(time.process_time() - self.began)
            self.asked.recv()
            self.began = time.process_time()


@dataclass(frozen=True, slots=True)
class Seconds:
    """CPU seconds of each turn of a pair of processes, and of our save at the end."""

    ours: list[float]
    bare: list[float]
    save: float


def measure(rounds: int) -> Report:
    """Train in each form for `rounds` turns, at most 2, in each pair of processes, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    rows, ratios, saves = [], {}, []
    for form in FORMS:
        pairs = [_pair(form, rounds) for _ in range(PAIRS)]
        save = max(pair.save for pair in pairs)
        share = save * TURN * BATCH / EPOCH
        ours = [TURN * BATCH / (seconds + share) for pair in pairs for seconds in pair.ours]
        bare = [TURN * BATCH / seconds for pair in pairs for seconds in pair.bare]
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
            "pairs_of_processes": PAIRS,
            "turns": rounds,
            "updates_of_a_turn": TURN,
            "batch": BATCH,
            "seconds_of_a_save": max(saves),
        },
    )


def _pair(form: str, rounds: int) -> Seconds:
    """Let the contenders train in turn, each in a process of its own."""
    with _process(_train_bare, form, rounds) as bare, _process(_train_ours, form, rounds) as ours:
        turns = [(_turn(bare), _turn(ours)) for _ in range(1 + rounds)][1:]
        return Seconds([own for _, own in turns], [other for other, _ in turns], _turn(ours))


@contextlib.contextmanager
def _process(train: Callable[[str, int, Connection], None], *args: object) -> Iterator[Connection]:
    """Start a contender in a new process, and end it."""
    context = multiprocessing.get_context(START)
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()  # so that `recv` raises EOFError when the process fails
    with ours:
        yield ours
    process.join()


def _turn(contender: Connection) -> float:
    """Ask a contender for its next turn, and return the CPU seconds of it."""
    contender.send(None)
    seconds: float = contender.recv()
    return seconds


def _images(rounds: int) -> tuple[Tensor, Tensor]:
    count = (1 + rounds) * TURN * BATCH
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8), torch.arange(count) % 10


def _train_ours(form: str, rounds: int, asked: Connection) -> None:
    """Train by a Trainer; after the turns tell the CPU seconds of the save at the end."""
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    precision, channels_last = FORMS[form]
    model, optimizer = _model(channels_last)
    images, labels = _images(rounds)
    loader = ours_in_memory(
        images, "transforms=crop_flip", f"loader.batch_size={BATCH}", targets=labels
    )
    turns = Turns(asked)
    callbacks: dict[str, Callback] = {
        "progress": Progress(),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
        "metrics_log": MetricsLog(),
        "turns": turns,
        "checkpoint": Checkpoint(every_n_epochs=None, monitor=None),
    }
    options = TrainerOptions(
        max_steps=len(images) // BATCH, log_every_n_steps=TURN, channels_last=channels_last
    )
    asked.recv()
    folders = tempfile.TemporaryDirectory()
    with _quiet_terminal(), folders as folder, contextlib.closing(loader):
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
        asked.send(time.process_time() - turns.began)


def _train_bare(form: str, rounds: int, asked: Connection) -> None:
    """Train by hand."""
    torch.set_num_threads(1)
    updates = _bare(form, *_images(rounds))
    for _ in range(1 + rounds):
        asked.recv()
        began = time.process_time()
        for _ in range(TURN):
            next(updates)
        asked.send(time.process_time() - began)


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
