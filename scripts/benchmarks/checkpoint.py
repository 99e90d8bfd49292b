"""How long a save keeps the training waiting: our callback, and a durable save written by hand.

ResNet-50 on a CPU or GPU, as it trains. By hand is what is needed for a resume, by `torch.save` to
a temporary file, fsync and rename, in the loop. Both save in turn within one run, and the one by
hand begins when ours is written. The first saves are not counted: ours takes its memory then, and
is waited for. The rows of updates show what a write costs the training that goes on beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from callbacks.checkpoint import Checkpoint
from models.resnet import ResNet
from scripts.benchmarks.report import Report, Row
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-4),
}
INTERVAL = 4  # updates from one of our saves to the next; by hand it is the last of them
BATCH, SIZE = 2, 32  # images, and pixels a side
MOST_ROUNDS = 15  # of five seconds or more for each optimizer


network = partial(ResNet, depth=50, num_classes=10, in_channels=3, stem="imagenet")


class Ours(Checkpoint):
    """Save by the callback, and note how long its boundaries take from one save to the next."""

    def __init__(self) -> None:
        super().__init__(every_n_epochs=None, every_n_steps=INTERVAL, monitor=None, save_top_k=0)
        self.blocked: list[float] = []

    def on_boundary(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        started = time.perf_counter()
        super().on_boundary(trainer)
        seconds = time.perf_counter() - started
        if trainer.state.global_step % INTERVAL == 0:
            self.blocked.append(seconds)
        elif self.blocked:
            self.blocked[-1] += seconds


@dataclass(slots=True)
class ByHand(Callback):
    """Save in the loop, half an interval later; time the updates in between."""

    folder: Path
    blocked: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)  # updates while a checkpoint is written
    alone: list[float] = field(default_factory=list)
    began: float = 0.0

    def on_update_end(self, trainer: Trainer) -> None:
        """Note how long the update took."""
        if self.began and len(self.blocked) > 1:
            updates = self.beside if _writers() else self.alone
            updates.append(time.perf_counter() - self.began)

    def on_boundary(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        if trainer.state.global_step % INTERVAL == INTERVAL - 1:
            for writer in _writers():
                writer.join()
            started = time.perf_counter()
            self._save(trainer)
            self.blocked.append(time.perf_counter() - started)
        self.began = time.perf_counter()

    def _save(self, trainer: Trainer) -> None:
        content = {
            "model": trainer.model.state_dict(),
            "optimizer": next(iter(trainer.optimizers.items()))[1].state_dict(),
            "step": trainer.state.global_step,
        }
        temporary = self.folder / "last.tmp"
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / "last.pt")
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(rounds: int) -> Report:
    """Save `rounds` times, at most 15, in each way, with each optimizer, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    rows, ratios = [], {}
    for name in OPTIMIZERS:
        ours, by_hand = _run(name, rounds)
        ratios[name] = _ratio(ours.blocked, by_hand.blocked)
        rows += _rows(name, ours, by_hand, ratios[name])
    return Report(
        name="checkpoint",
        title=f"Time that a save keeps the training of ResNet-50 waiting ({_DEVICE})",
        unit="ms",
        rows=rows,
        headlines={
            "ratio_to_handwritten": max(ratios.values()),
            **{f"ratio_to_handwritten_{name.lower()}": ratio for name, ratio in ratios.items()},
        },
        settings={"rounds": rounds, "updates_between_saves": INTERVAL, "batch": BATCH},
    )


_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _run(optimizer: str, rounds: int) -> tuple[Ours, ByHand]:
    torch.manual_seed(0)
    model = network().to(_DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        ours, by_hand = Ours(), ByHand(Path(folder))
        Trainer(
            model,
            Classification(num_classes=10),
            OPTIMIZERS[optimizer](model.parameters()),
            _Batches(),
            strategy=Strategy(_DEVICE),
            callbacks={"by_hand": by_hand, "checkpoint": ours},
            options=TrainerOptions(max_steps=(rounds + 1) * INTERVAL, log_every_n_steps=INTERVAL),
            run_dir=Path(folder),
        ).fit()
    # The first of ours takes its memory, and is waited for.
    ours.blocked, by_hand.blocked = ours.blocked[1:], by_hand.blocked[1:]
    return ours, by_hand


class _Batches:
    """The same batch without end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batch = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(10, (BATCH,))
        while True:
            yield batch


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def _rows(name: str, ours: Ours, by_hand: ByHand, ratio: float) -> list[Row]:
    hand = f"{name}, by hand"
    rows = [_row(hand, by_hand.blocked), _row(f"{name}, Regimen", ours.blocked, ratio, hand)]
    if by_hand.alone and by_hand.beside:
        alone, beside = f"{name}, an update alone", f"{name}, an update beside a write"
        slower = statistics.median(by_hand.beside) / statistics.median(by_hand.alone)
        rows += [_row(alone, by_hand.alone), _row(beside, by_hand.beside, slower, alone)]
    return rows


def _row(name: str, seconds: list[float], ratio: float | None = None, to: str = "") -> Row:
    values = [1e3 * value for value in seconds]
    return Row(name, statistics.median(values), min(values), max(values), ratio, to)


def _ratio(ours: list[float], by_hand: list[float]) -> float:
    """Return the median over the turns."""
    return statistics.median(a / b for a, b in zip(ours, by_hand, strict=False))
