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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

from callbacks.lr_monitor import LRMonitor
from callbacks.progress import Progress
from callbacks.tensorboard import TensorBoard
from scripts.benchmarks.report import Report, Row, one_thread
from trainer.callback import Callback
from trainer.options import Clipping, TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BLOCK = 50  # updates between two logs
WARMUP = 2  # blocks that are not counted
BLOCKS = 10  # a turn is short, so that both of a pair meet the same machine
STEPS = (WARMUP + BLOCKS) * BLOCK
MAX_LR = 0.01
BATCH = 32

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of an update."""

    wall: float
    cpu: float


class Batches(Dataset[Batch]):
    """The same batch `STEPS` times, each with a time stamp."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH, 32, generator=generator)
        self._batch = images, torch.randint(10, (BATCH,), generator=generator)
        self._stamps: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Batch:
        self._stamps.append((time.perf_counter(), time.process_time()))
        return self._batch

    def cost(self) -> Cost:
        """Return the median over the blocks after the warm-up."""
        blocks = list(pairwise(self._stamps[WARMUP * BLOCK :: BLOCK]))
        wall, cpu = ([(b[i] - a[i]) / BLOCK * 1e6 for a, b in blocks] for i in (0, 1))
        return Cost(statistics.median(wall), statistics.median(cpu))


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contender starts with."""

    model: nn.Module
    optimizer: SGD
    loader: DataLoader[Batch]
    folder: Path


Contender = Callable[[Setup], None]


def bare(parts: Setup) -> None:
    """Draw, forward, backward, step: nothing else."""
    for inputs, labels in parts.loader:
        parts.optimizer.zero_grad()
        cross_entropy(parts.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        parts.optimizer.step()


def handwritten(parts: Setup) -> None:
    """Do by hand what a person has on: bar, TensorBoard, clipping, schedule, accuracy."""
    model, optimizer = parts.model, parts.optimizer
    schedule = _schedule(optimizer)
    writer = SummaryWriter(str(parts.folder))
    losses, correct, seen = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
    model.train()
    with tqdm(total=STEPS, desc="epoch 0") as bar:
        for step, (inputs, labels) in enumerate(parts.loader, 1):
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


def regimen(parts: Setup) -> None:
    """Do the same by a Trainer."""
    callbacks: dict[str, Callback] = {
        "progress": Progress(),
        "tensorboard": TensorBoard(),
        "lr_monitor": LRMonitor(),
    }
    _train(parts, callbacks, Clipping(norm=1.0), _schedule(parts.optimizer))


def regimen_plain(parts: Setup) -> None:
    """Train by a Trainer with all of that off."""
    _train(parts, {}, Clipping(), None)


CONTENDERS: dict[str, tuple[Contender, str]] = {
    "by hand": (handwritten, "by hand"),
    "Regimen": (regimen, "by hand"),
    "bare loop": (bare, "bare loop"),
    "Regimen, all off": (regimen_plain, "bare loop"),
}


def measure(rounds: int) -> Report:
    """Run every contender `rounds` times, in turn, and compare."""
    costs: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
    with one_thread(), _quiet_terminal():
        for _ in range(rounds):
            for name, (contender, _reference) in CONTENDERS.items():
                costs[name].append(_run(contender))
    return Report(
        name="step",
        title=f"Cost of an update: MLP 32-32-10, batches of {BATCH} in memory, one thread",
        unit="µs",
        rows=[_row(name, costs) for name in CONTENDERS],
        headlines={
            "ratio_to_handwritten": _ratio(costs, "Regimen", lambda cost: cost.wall),
            "cpu_ratio_to_handwritten": _ratio(costs, "Regimen", lambda cost: cost.cpu),
            "cpu_ratio_all_off_to_bare": _ratio(costs, "Regimen, all off", lambda cost: cost.cpu),
        },
        settings={"rounds": rounds, "updates": BLOCKS * BLOCK, "block": BLOCK},
    )


def _train(
    parts: Setup,
    callbacks: dict[str, Callback],
    clipping: Clipping,
    schedule: OneCycleLR | None,
) -> None:
    Trainer(
        parts.model,
        Classification(num_classes=10),
        parts.optimizer,
        parts.loader,
        lr_scheduler=schedule,
        callbacks=callbacks,
        options=TrainerOptions(max_epochs=1, clipping=clipping, log_every_n_steps=BLOCK),
        run_dir=parts.folder,
    ).fit()


def _run(contender: Contender) -> Cost:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = SGD(model.parameters(), lr=MAX_LR, momentum=0.9, weight_decay=5e-4)
    batches = Batches()
    loader = DataLoader(batches, batch_size=None)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        contender(Setup(model, optimizer, loader, Path(folder)))
    return batches.cost()


def _schedule(optimizer: SGD) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=STEPS + 1)


def _row(name: str, costs: dict[str, list[Cost]]) -> Row:
    own = [cost.wall for cost in costs[name]]
    ratio = _ratio(costs, name, lambda cost: cost.wall)
    return Row(name, statistics.median(own), min(own), max(own), ratio, CONTENDERS[name][1])


def _ratio(costs: dict[str, list[Cost]], name: str, clock: Callable[[Cost], float]) -> float:
    """Return the median over the turns of a contender's cost by its reference's."""
    pairs = zip(costs[name], costs[CONTENDERS[name][1]], strict=True)
    return statistics.median(clock(own) / clock(other) for own, other in pairs)


class _Terminal(io.StringIO):
    """A terminal that no one looks at: bars draw themselves on it as on any."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _quiet_terminal() -> Iterator[None]:
    with contextlib.redirect_stderr(_Terminal()):
        yield
