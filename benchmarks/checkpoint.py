"""How long a save keeps the training waiting: our callback, and a durable save written by hand.

ResNet-50 on a CPU or GPU, as it trains. By hand is what is needed for a resume, by `torch.save` to
a temporary file, fsync and rename, in the loop. Both save in turn within one run, and the one by
hand begins when ours is written. The first saves are not counted: ours takes its memory then, and
is waited for. The updates beside a write show what it costs the training that goes on.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import report
from benchmarks.ours import train
from benchmarks.report import BY_HAND, OURS, Report
from callbacks.checkpoint import Checkpoint
from models.resnet import ResNet
from trainer.callback import Callback
from trainer.strategies.strategy import Strategy
from trainer.trainer import Trainer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-4),
}
INTERVAL = 4  # updates from one of our saves to the next; by hand it is the last of them
BATCH, SIZE = 2, 32  # images, and pixels a side
MOST_ROUNDS = 15  # of five seconds or more for each optimizer
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

network = partial(ResNet, depth=50, num_classes=10, in_channels=3, stem="imagenet")


class Ours(Checkpoint):
    """Save by the callback, and note how long its boundaries take from one save to the next."""

    def __init__(self) -> None:
        super().__init__(every_n_epochs=None, every_n_steps=INTERVAL, monitor=None, save_top_k=0)
        self.blocked: list[float] = []  # milliseconds

    def on_boundary(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        started = time.perf_counter()
        super().on_boundary(trainer)
        spent = 1e3 * (time.perf_counter() - started)
        if trainer.state.global_step % INTERVAL == 0:
            self.blocked.append(spent)
        elif self.blocked:
            self.blocked[-1] += spent


class ByHand(Callback):
    """Save in the loop, half an interval later; time the updates in between."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, 0.0
        self.blocked: list[float] = []
        self.updates: dict[bool, list[float]] = {False: [], True: []}  # is ours being written?

    def on_update_end(self, trainer: Trainer) -> None:
        """Note how long the update took."""
        if len(self.blocked) > 1:
            self.updates[bool(_writers())].append(1e3 * (time.perf_counter() - self.began))

    def on_boundary(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        if trainer.state.global_step % INTERVAL == INTERVAL - 1:
            for writer in _writers():
                writer.join()
            started = time.perf_counter()
            ((_, optimizer),) = trainer.optimizers.items()
            content = {"model": trainer.model.state_dict(), "optimizer": optimizer.state_dict()}
            with (self.folder / "last.tmp").open("wb") as file:
                torch.save({**content, "step": trainer.state.global_step}, file)
                file.flush()
                os.fsync(file.fileno())
            (self.folder / "last.tmp").replace(self.folder / "last.pt")
            descriptor = os.open(self.folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            self.blocked.append(1e3 * (time.perf_counter() - started))
        self.began = time.perf_counter()


def measure(rounds: int) -> Report:
    """Save `rounds` times, at most 15, in each way, with each optimizer, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    values: dict[str, list[float]] = {}
    for name in OPTIMIZERS:
        ours, hand = run(name, rounds)
        values |= {f"{name}, {BY_HAND}": hand.blocked, f"{name}, {OURS}": ours.blocked}
        for beside, title in ((False, "an update alone"), (True, "beside a write")):
            if hand.updates[beside]:
                values[f"{name}, {title}"] = hand.updates[beside]
    references = {f"{name}, {OURS}": f"{name}, {BY_HAND}" for name in OPTIMIZERS}
    found = report.ratios(values, references)
    return Report(
        "checkpoint",
        f"Time that a save keeps the training of ResNet-50 waiting ({DEVICE})",
        "ms",
        values,
        references,
        {"ratio_to_handwritten": max(found.values())}
        | {f"ratio_to_handwritten_{n.lower()}": found[f"{n}, {OURS}"] for n in OPTIMIZERS},
        {"rounds": rounds, "updates_between_saves": INTERVAL, "batch": BATCH},
    )


def run(optimizer: str, rounds: int) -> tuple[Ours, ByHand]:
    """Train with both; the first save of each is forgotten."""
    torch.manual_seed(0)
    model, updates = network().to(DEVICE), (rounds + 1) * INTERVAL
    with tempfile.TemporaryDirectory() as folder:
        ours, hand = Ours(), ByHand(Path(folder))
        train(
            model,
            OPTIMIZERS[optimizer](model.parameters()),
            [(torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(10, (BATCH,)))] * updates,
            {"max_steps": updates, "log_every_n_steps": INTERVAL},
            callbacks={"by_hand": hand, "checkpoint": ours},
            run_dir=folder,
            strategy=Strategy(DEVICE),
        )
    del ours.blocked[0], hand.blocked[0]
    return ours, hand


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
