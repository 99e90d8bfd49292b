"""What the loop costs: our Trainer, the same written by hand, and less than either.

A tiny network on batches that lie in memory, so that nothing but the loop shows. Every contender
draws from the same kind of DataLoader, and the clock is in its data set: a time stamp for each
batch. A block is 50 updates, the interval of logging, so each block holds one log. The ratios of
CPU time stand beside those of wall time: they hold on a machine that others use, too.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from benchmarks import report
from benchmarks.ours import classifier
from benchmarks.report import BY_HAND, OURS, Cost, Report, Terminal
from callbacks.lr_monitor import LRMonitor
from callbacks.progress import Progress
from callbacks.tensorboard import TensorBoard

BLOCK = 50  # updates between two logs
WARMUP, BLOCKS = 2, 10  # a turn is short, so that both of a pair meet the same machine
MAX_LR, BATCH = 0.01, 32

Batch = tuple[Tensor, Tensor]
Contender = Callable[[nn.Module, SGD, DataLoader[Batch], Path], None]


class Batches(Dataset[Batch]):
    """The same batch for every update, each with a time stamp."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH, 32, generator=generator)
        self._batch = images, torch.randint(10, (BATCH,), generator=generator)
        self._stamps: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return (WARMUP + BLOCKS) * BLOCK

    def __getitem__(self, index: int) -> Batch:
        self._stamps.append((time.perf_counter(), time.process_time()))
        return self._batch

    def cost(self) -> Cost:
        """Return the microseconds of an update: the median over the blocks after the warm-up."""
        blocks = list(pairwise(self._stamps[WARMUP * BLOCK :: BLOCK]))
        wall, cpu = (statistics.median(b[i] - a[i] for a, b in blocks) for i in (0, 1))
        return Cost(wall / BLOCK * 1e6, cpu / BLOCK * 1e6)


def bare(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Draw, forward, backward, step: nothing else."""
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def by_hand(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Do by hand what a person has on: bar, TensorBoard, clipping, schedule, accuracy."""
    schedule = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1)
    writer = SummaryWriter(str(folder))
    losses, correct, seen = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
    model.train()
    with tqdm(total=len(loader), desc="epoch 0") as bar:
        for step, (inputs, labels) in enumerate(loader, 1):
            logits = model(inputs)
            loss = cross_entropy(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
            seen += len(labels)
            if step % BLOCK == 0:
                mean, accuracy = losses.item() / BLOCK, correct.item() / seen
                writer.add_scalar("train/loss", mean, step)
                writer.add_scalar("train/accuracy", accuracy, step)
                writer.add_scalar("lr", schedule.get_last_lr()[0], step)
                bar.set_postfix(loss=f"{mean:.3f}", accuracy=f"{accuracy:.3f}", refresh=False)
                losses.zero_()
                correct.zero_()
                seen = 0
            bar.update(1)
    writer.close()


def ours(
    model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path, all_on: bool = True
) -> None:
    """Do the same by a Trainer, or with all of that off."""
    on = {"progress": Progress(), "tensorboard": TensorBoard(), "lr_monitor": LRMonitor()}
    schedule = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1) if all_on else None
    clip = 1.0 if all_on else None
    options = {"max_epochs": 1, "clip_grad_norm": clip, "log_every_n_steps": BLOCK}
    callbacks = on if all_on else {}
    classifier(
        model, optimizer, loader, callbacks, folder, options=options, lr_scheduler=schedule
    ).fit()


CONTENDERS: dict[str, Contender] = {
    BY_HAND: by_hand,
    OURS: ours,
    "bare loop": bare,
    "Regimen, all off": partial(ours, all_on=False),
}
REFERENCES = {OURS: BY_HAND, "Regimen, all off": "bare loop"}


def measure(rounds: int) -> Report:
    """Run every contender `rounds` times, in turn, and compare."""
    with report.one_thread(), contextlib.redirect_stderr(Terminal()):
        runs = {name: partial(run, contender) for name, contender in CONTENDERS.items()}
        costs = report.in_turn(runs, rounds, uncounted=0)
    wall, cpu = report.by_clock(costs), report.by_cpu(costs)
    return Report(
        name="step",
        title=f"Cost of an update: MLP 32-32-10, batches of {BATCH} in memory, one thread",
        unit="µs",
        rows=report.compared(wall, REFERENCES),
        headlines={
            "ratio_to_handwritten": report.paired(wall[OURS], wall[BY_HAND]),
            "cpu_ratio_to_handwritten": report.paired(cpu[OURS], cpu[BY_HAND]),
            "cpu_ratio_all_off_to_bare": report.paired(cpu["Regimen, all off"], cpu["bare loop"]),
        },
        settings={"rounds": rounds, "updates": BLOCKS * BLOCK, "block": BLOCK},
    )


def run(contender: Contender) -> Cost:
    """Let a contender train a new network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = SGD(model.parameters(), lr=MAX_LR, momentum=0.9, weight_decay=5e-4)
    batches = Batches()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        contender(model, optimizer, DataLoader(batches, batch_size=None), Path(folder))
    return batches.cost()
