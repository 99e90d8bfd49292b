"""What the loop costs: our Trainer, the same written by hand, and less than either.

A tiny network on batches that lie in memory, so that nothing but the loop shows. Every contender
draws from the same kind of DataLoader, and the clock is in its data set: a time stamp for each
batch. A block is 50 updates, the interval of logging, so each block holds one log. The ratios of
CPU time stand beside those of wall time: they hold on a machine that others use, too.
"""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from benchmarks import report
from benchmarks.by_hand import updates
from benchmarks.ours import train
from benchmarks.report import BARE, BY_HAND, OURS, Cost, Report
from callbacks.lr_monitor import LRMonitor
from callbacks.progress import Progress
from callbacks.tensorboard import TensorBoard

BLOCK = 50  # updates between two logs
WARMUP, BLOCKS = 2, 10  # a turn is short, so that both of a pair meet the same machine
MAX_LR, BATCH = 0.01, 32
OFF = "Regimen, all off"

Batch = tuple[Tensor, Tensor]
Contender = Callable[[nn.Module, SGD, DataLoader[Batch], Path], None]


class Batches(Dataset[Batch]):
    """The same batch for every update, each with a time stamp."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH, 32, generator=generator)
        self._batch = images, torch.randint(10, (BATCH,), generator=generator)
        self.stamps: list[Cost] = []

    def __len__(self) -> int:
        return (WARMUP + BLOCKS) * BLOCK

    def __getitem__(self, index: int) -> Batch:
        self.stamps.append(report.now())
        return self._batch


def bare(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Draw, forward, backward, step: nothing else."""
    for _ in updates(model, optimizer, loader):
        pass


def by_hand(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Do by hand what a person has on: bar, TensorBoard, clipping, schedule, accuracy."""
    schedule = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1)
    writer = SummaryWriter(str(folder))
    losses, correct, seen = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
    model.train()
    with tqdm(total=len(loader), desc="epoch 0") as bar:
        done = updates(model, optimizer, loader, clip=True)
        for step, (loss, logits, labels, _) in enumerate(done, 1):
            schedule.step()
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
    on = {"progress": Progress(bar=True), "tensorboard": TensorBoard(), "lr_monitor": LRMonitor()}
    schedule = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1)
    used: dict[str, Any] = {"callbacks": on, "lr_scheduler": schedule} if all_on else {}
    clip = {"clip_grad_norm": 1.0} if all_on else {}
    options = {"max_epochs": 1, "log_every_n_steps": BLOCK, **clip}
    train(model, optimizer, loader, options, run_dir=folder, **{"callbacks": {}, **used})


CONTENDERS: dict[str, Contender] = {
    BY_HAND: by_hand,
    OURS: ours,
    BARE: bare,
    OFF: partial(ours, all_on=False),
}


def measure(rounds: int) -> Report:
    """Run every contender `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    runs = {name: partial(run, contender) for name, contender in CONTENDERS.items()}
    wall, cpu = report.split(report.in_turn(runs, rounds, uncounted=0))
    return Report(
        "step",
        f"Cost of an update: MLP 32-32-10, batches of {BATCH} in memory, one thread",
        "µs",
        wall,
        {OURS: BY_HAND, OFF: BARE},
        {
            "ratio_to_handwritten": report.paired(wall[OURS], wall[BY_HAND]),
            "cpu_ratio_to_handwritten": report.paired(cpu[OURS], cpu[BY_HAND]),
            "cpu_ratio_all_off_to_bare": report.paired(cpu[OFF], cpu[BARE]),
        },
        {"rounds": rounds, "updates": BLOCKS * BLOCK, "block": BLOCK},
    )


def run(contender: Contender) -> Cost:
    """Let a contender train a new network; return the microseconds of an update.

    They are the median over the blocks after the warm-up.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = SGD(model.parameters(), lr=MAX_LR, momentum=0.9, weight_decay=5e-4)
    batches = Batches()
    gc.collect()
    # Where nobody looks, bars draw themselves as on any terminal.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        contender(model, optimizer, DataLoader(batches, batch_size=None), Path(folder))
    wall, cpu = report.typical(batches.stamps[WARMUP * BLOCK :: BLOCK])
    return Cost(wall / BLOCK * 1e6, cpu / BLOCK * 1e6)
