"""What a run costs as it goes on: its samples and updates as they grow, and the saving of it.

growth, data: the samples of an update. Orders in memory (8 bytes a sample), and computed position
by position (`loader/sampler=low_memory`, which sets of 10^8 samples and more have by themselves).
The clock runs over updates one after the other; an order in memory is made before. Memory is what
is held in the end.

growth, the run: 10^6 updates of a network with one weight, so that nothing but the loop shows, with
TensorBoard, `metrics.jsonl` and a log line every 50. The cost of an update is that of the last
tenth before 10^3, 10^4, ... updates, by the CPU's time; memory is the process's. In all about two
minutes.

checkpoint: how long a save keeps ResNet-50 waiting on a CPU or GPU, our callback and a durable save
by hand: what is needed for a resume, by `torch.save` to a temporary file, fsync and rename, in the
loop. Both save in turn within one run, and the one by hand begins when ours is written. The first
saves are not counted: ours takes its memory then, and is waited for. The updates beside a write
show what it costs the training that goes on.
"""

import os
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW

from benchmarks import report
from benchmarks.ours import AfterUpdate, train
from benchmarks.report import BY_HAND, OURS, Report
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.data.orders import LowMemory, Order, Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.models.resnet import ResNet
from regimen.trainer.device import device_types
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer

ORDERED = 128  # samples of an update
UPDATES = 1024  # one after the other, that are timed
DECADES = range(3, 7)  # a run's cost is taken at 10^3 to 10^6 updates
ORDERS: dict[str, tuple[Callable[[int, int], Order], range]] = {  # and powers of ten
    "in memory": (Shuffled, range(4, 8)),
    "low_memory": (lambda samples, seed: LowMemory(range(samples), seed), range(4, 9)),
}

OPTIMIZERS: Any = {"SGD": partial(SGD, lr=1e-3, momentum=0.9), "AdamW": partial(AdamW, lr=1e-4)}
INTERVAL = 4  # updates from one of our saves to the next; by hand it is the last of them
BATCH, SIZE = 2, 32  # images, and pixels a side
ALONE, BESIDE = "an update alone", "beside a write"
DEVICE = device_types()[0]

network = partial(ResNet, depth=50, num_classes=10, in_channels=3, stem="imagenet")


def growth(rounds: int) -> Report:
    """Time the updates of every order and size `rounds` times, in turn; then a run."""
    cases = {f"{kind}, 10^{n}": (kind, n) for kind, (_, sizes) in ORDERS.items() for n in sizes}
    runs = {name: partial(order_cost, *case) for name, case in cases.items()}
    firsts = {name: f"{kind}, 10^{ORDERS[kind][1][0]}" for name, (kind, _) in cases.items()}
    values = report.in_turn(runs, rounds, uncounted=0)
    grown = report.ratios(values, firsts)
    held = {name: order_bytes(*case) for name, case in cases.items()}
    costs, grown_by = run_costs()
    decades = {f"a run at 10^{n}": [cost] for n, cost in zip(DECADES, costs, strict=True)}
    power = ORDERS["in memory"][1][-1]
    return Report(
        f"An update's samples, batches of {ORDERED}, and a run's updates, as they grow",
        "µs",
        {**values, **decades},
        {
            "ratio_to_smallest": max(grown.values()),
            "bytes_a_sample_in_memory": held[f"in memory, 10^{power}"] / 10**power,
            "bytes_in_all_low_memory": held[next(reversed(cases))],
            "run_ratio_to_first_decade": costs[-1] / costs[0],
            "run_growth_mib": grown_by / 2**20,
        },
        {**firsts, **dict.fromkeys(decades, f"a run at 10^{DECADES[0]}")},
        {"bytes": held},
    )


def order_cost(kind: str, power: int) -> float:
    """Return the mean time of an update in microseconds."""
    sampler = UpdateSampler(ORDERS[kind][0](10**power, 0), batch_size=ORDERED)
    sampler.batch_slices(0, 0)  # makes an order in memory
    since, number = time.process_time(), min(len(sampler), UPDATES)
    for update in range(number):
        sampler.batch_slices(0, update)
    return (time.process_time() - since) / number * 1e6


def order_bytes(kind: str, power: int) -> float:
    """Return the bytes that a sampler holds after a few updates."""
    tracemalloc.start()
    sampler = UpdateSampler(ORDERS[kind][0](10**power, 0), batch_size=ORDERED)
    for update in (0, len(sampler) - 1, len(sampler) // 2):
        sampler.batch_slices(0, update)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return float(held)


class Output(Task):
    """The loss is what the network returns."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """Return it."""
        return model(batch)


def run_costs() -> tuple[list[float], int]:
    """Return an update's cost at each decade of a run, and by how many bytes the last one grew."""
    torch.set_num_threads(1)
    model, updates = nn.Linear(1, 1, bias=False), 10 ** DECADES[-1]
    places = {n * 10 ** (power - 1) for power in DECADES for n in (9, 10)}
    notes: list[tuple[int, float, int]] = []

    def note(trainer: Trainer) -> None:
        """Note the CPU's time and the process's memory."""
        if (step := trainer.state.updates) in places:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            notes.append((step, time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")))

    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            SGD(model.parameters(), lr=0.01),
            [torch.zeros(1)] * updates,
            {"max_steps": updates, "log_every_n_steps": 50},
            task=Output(),
            callbacks={"b": TensorBoard(), "metrics": MetricsLog(), "notes": AfterUpdate(note)},
            run_dir=folder,
        )
    pairs = zip(notes[::2], notes[1::2], strict=True)
    costs = [(end[1] - begin[1]) / (end[0] - begin[0]) * 1e6 for begin, end in pairs]
    return costs, notes[-1][2] - notes[-3][2]


class Saves(Checkpoint):
    """Save by the callback, and half an interval later by hand; note the milliseconds of both.

    Ours are those of its boundaries from one save to the next. The updates in between are timed. On
    an accelerator the host waits for it at both ends: a copy that is only queued keeps the next
    update waiting.
    """

    def __init__(self, folder: Path, interval: int = INTERVAL) -> None:
        super().__init__(every_n_epochs=None, every_n_steps=interval, monitor=None, save_top_k=0)
        self.folder, self.began, self.interval = folder, 0.0, interval
        self.blocked: dict[str, list[float]] = {BY_HAND: [], OURS: []}
        self.updates: dict[str, list[float]] = {ALONE: [], BESIDE: []}
        self.file_size = 0  # bytes of the one by hand

    def on_update_end(self, trainer: Trainer) -> None:
        """Note how long the update took."""
        if len(self.blocked[BY_HAND]) > 1:
            self.updates[BESIDE if _writers() else ALONE].append(_since(self.began))

    def on_boundary(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        began, place = _now(), trainer.state.global_step % self.interval
        super().on_boundary(trainer)
        if place == 0:
            self.blocked[OURS].append(_since(began))
        elif self.blocked[OURS]:
            self.blocked[OURS][-1] += _since(began)
        if place == self.interval - 1:
            for writer in _writers():
                writer.join()
            began = _now()
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
            self.blocked[BY_HAND].append(_since(began))
        self.began = _now()


def _now() -> float:
    """Return the time when the device has done all that it was given."""
    if DEVICE != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _since(began: float) -> float:
    return 1e3 * (_now() - began)


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def checkpoint(rounds: int) -> Report:
    """Save `rounds` times in each way, with each optimizer, and compare."""
    values: dict[str, list[float]] = {}
    for name in OPTIMIZERS:
        saves = save_in_turn(name, rounds)
        values |= {f"{name}, {who}": own[1:] for who, own in saves.blocked.items()}  # not the first
        values |= {f"{name}, {what}": own for what, own in saves.updates.items() if own}
    found = report.ratios(values)
    return Report(
        f"Time that a save keeps the training of ResNet-50 waiting ({DEVICE})",
        "ms",
        values,
        {"ratio_to_handwritten": max(found.values())}
        | {f"ratio_to_handwritten_{n.lower()}": found[f"{n}, {OURS}"] for n in OPTIMIZERS},
    )


def save_in_turn(optimizer: str, rounds: int, interval: int = INTERVAL) -> Saves:
    """Train ResNet-50 with `rounds` saves of each kind that count, after a first one."""
    torch.manual_seed(0)
    model, updates = network().to(DEVICE), (rounds + 1) * interval
    with tempfile.TemporaryDirectory() as folder:
        saves = Saves(Path(folder), interval)
        train(
            model,
            OPTIMIZERS[optimizer](model.parameters()),
            [(torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(10, (BATCH,)))] * updates,
            {"max_steps": updates, "log_every_n_steps": interval},
            callbacks={"saves": saves},
            run_dir=folder,
            strategy=Strategy(DEVICE),
        )
        saves.file_size = (saves.folder / "last.pt").stat().st_size
    return saves
