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
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import report
from benchmarks.by_hand import updates
from benchmarks.data import ours_in_memory
from benchmarks.ours import train
from benchmarks.report import BARE, OURS, Report
from callbacks.checkpoint import Checkpoint
from callbacks.lr_monitor import LRMonitor
from callbacks.progress import Progress
from callbacks.tensorboard import TensorBoard
from callbacks.trackers.recorder import MetricsLog
from models.resnet import ResNet
from scripts.cli.console import keep_freed_memory
from trainer.callback import Callback
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


def measure(rounds: int) -> Report:
    """Train in each form for `rounds` turns, at most 2, in each pair of processes, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    rates: dict[str, list[float]] = {}
    saves = []
    for form in FORMS:
        pairs = [_pair(form, rounds) for _ in range(PAIRS)]
        saves.append(max(save for _, _, save in pairs))
        share = saves[-1] * TURN * BATCH / EPOCH
        rates[f"{BARE}, {form}"] = [TURN * BATCH / s for bare, _, _ in pairs for s in bare]
        rates[f"{OURS}, {form}"] = [TURN * BATCH / (s + share) for _, o, _ in pairs for s in o]
    references = {f"{OURS}, {form}": f"{BARE}, {form}" for form in FORMS}
    ratios = report.ratios(rates, references).values()
    return Report(
        "train",
        "ResNet-18 on images of 32 x 32, one thread",
        "images/s",
        rates,
        references,
        {"ratio_to_reference": next(iter(ratios)), "least_ratio": min(ratios)},
        {"pairs_of_processes": PAIRS, "turns": rounds, "updates_of_a_turn": TURN, "batch": BATCH}
        | {"seconds_of_a_save": max(saves)},
    )


def _pair(form: str, rounds: int) -> tuple[list[float], list[float], float]:
    """Return the CPU seconds of each turn of both, and of our save at the end."""

    def turn(contender: Connection) -> Any:
        contender.send(None)  # asks for it
        return contender.recv()

    with _process(bare, form, rounds) as theirs, _process(ours, form, rounds) as own:
        turns = [(turn(theirs), turn(own)) for _ in range(1 + rounds)][1:]
        return [t for t, _ in turns], [o for _, o in turns], turn(own)


@contextlib.contextmanager
def _process(
    contender: Callable[[str, int, Connection], None], *args: object
) -> Iterator[Connection]:
    """Start a contender in a new process, and end it."""
    context = multiprocessing.get_context(START)
    here, there = context.Pipe()
    process = context.Process(target=contender, args=(*args, there), daemon=True)
    process.start()
    there.close()  # so that `recv` raises EOFError when the process fails
    with here:
        yield here
    process.join()


def _parts(rounds: int, channels_last: bool) -> tuple[nn.Module, SGD, Tensor, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = network().to(memory_format=layout)
    count = (1 + rounds) * TURN * BATCH
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, images, torch.arange(count) % 10


def bare(form: str, rounds: int, asked: Connection) -> None:
    """Train by hand."""
    precision, channels_last = FORMS[form]
    model, optimizer, images, labels = _parts(rounds, channels_last)
    ready = images.float().div_(255).sub_(0.5).div_(0.25)
    if channels_last:
        ready = ready.contiguous(memory_format=torch.channels_last)
    batches = (
        (ready[rows], labels[rows]) for rows in torch.split(torch.randperm(len(ready)), BATCH)
    )
    done = updates(model, optimizer, batches, bf16_on="cpu" if precision == "bf16" else None)
    for _ in range(1 + rounds):
        asked.recv()
        began = time.process_time()
        for _ in range(TURN):
            next(done)
        asked.send(time.process_time() - began)


class Turns(Callback):
    """Stop after every turn, send its CPU seconds, and wait to be asked for the next."""

    def __init__(self, asked: Connection) -> None:
        self.asked, self.began = asked, 0.0

    def on_update_end(self, trainer: Trainer) -> None:
        """End a turn."""
        if trainer.state.updates % TURN == 0:
            self.asked.send(time.process_time() - self.began)
            self.asked.recv()
            self.began = time.process_time()


def ours(form: str, rounds: int, asked: Connection) -> None:
    """Train by a Trainer; after the turns tell the CPU seconds of the save at the end."""
    keep_freed_memory()  # as every command does
    precision, channels_last = FORMS[form]
    model, optimizer, images, labels = _parts(rounds, channels_last)
    words = ("transforms=crop_flip", f"loader.batch_size={BATCH}")
    loader = ours_in_memory(images, *words, targets=labels)
    turns, steps = Turns(asked), len(images) // BATCH
    options = {"max_steps": steps, "log_every_n_steps": TURN, "channels_last": channels_last}
    callbacks: dict[str, Callback] = {
        "progress": Progress(bar=True),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
        "metrics_log": MetricsLog(),
        "turns": turns,
        "checkpoint": Checkpoint(every_n_epochs=None, monitor=None),
    }
    asked.recv()
    with contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        others = {"callbacks": callbacks, "run_dir": folder, "precision": precision}
        train(model, optimizer, loader, options, **others)
        asked.send(time.process_time() - turns.began)
        loader.close()
