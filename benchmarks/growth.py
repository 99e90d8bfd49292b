"""What grows with the data set and with the run: time and memory, which should stay the same.

Data: the samples of an update. Orders in memory (8 bytes a sample), and computed position by
position (`loader/sampler=low_memory`, which sets of 10^8 samples and more have by themselves). The
clock runs over updates one after the other; an order in memory is made before. Memory is what is
held in the end.

The run: 10^6 updates of a network with one weight, so that nothing but the loop shows, with
TensorBoard, `metrics.jsonl` and a log line every 50. The cost of an update is that of the last
tenth before 10^3, 10^4, ... updates, by the CPU's time; memory is the process's. In all about two
minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import report
from benchmarks.report import Report
from callbacks.tensorboard import TensorBoard
from callbacks.trackers.recorder import MetricsLog
from data.orders import LowMemory, Order, Shuffled
from data.samplers import UpdateSampler
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.task import Task
from trainer.trainer import Trainer

BATCH = 128
UPDATES = 1024  # one after the other, that are timed
MOST_ROUNDS = 5  # an order of 10^7 samples takes a second to make
DECADES = range(3, 7)  # a run's cost is taken at 10^3 to 10^6 updates
ORDERS: dict[str, tuple[Callable[[int, int], Order], range]] = {  # and powers of ten
    "in memory": (Shuffled, range(4, 8)),
    "low_memory": (lambda samples, seed: LowMemory(range(samples), seed), range(4, 9)),
}


def measure(rounds: int) -> Report:
    """Time the updates of every order and size `rounds` times, at most 5, in turn; then a run."""
    rounds = min(rounds, MOST_ROUNDS)
    cases = {f"{kind}, 10^{n}": (kind, n) for kind, (_, sizes) in ORDERS.items() for n in sizes}
    runs = {name: partial(order_cost, *case) for name, case in cases.items()}
    firsts = {name: f"{kind}, 10^{ORDERS[kind][1][0]}" for name, (kind, _) in cases.items()}
    values = report.in_turn(runs, rounds, uncounted=0)
    grown = report.ratios(values, firsts)
    held = {name: order_bytes(*case) for name, case in cases.items()}
    costs, growth = run_costs()
    decades = {f"a run at 10^{n}": [cost] for n, cost in zip(DECADES, costs, strict=True)}
    power = ORDERS["in memory"][1][-1]
    return Report(
        "growth",
        f"An update's samples, batches of {BATCH}, and a run's updates, as they grow",
        "µs",
        {**values, **decades},
        {**firsts, **dict.fromkeys(decades, f"a run at 10^{DECADES[0]}")},
        {
            "ratio_to_smallest": max(grown.values()),
            "bytes_a_sample_in_memory": held[f"in memory, 10^{power}"] / 10**power,
            "bytes_in_all_low_memory": held[next(reversed(cases))],
            "run_ratio_to_first_decade": costs[-1] / costs[0],
            "run_growth_mib": growth / 2**20,
        },
        {"rounds": rounds, "updates": UPDATES, "bytes": held},
    )


def order_cost(kind: str, power: int) -> float:
    """Return the mean time of an update in microseconds."""
    sampler = UpdateSampler(ORDERS[kind][0](10**power, 0), batch_size=BATCH)
    spent, done = 0.0, 0
    for epoch in range(-(-UPDATES // len(sampler))):
        if kind == "in memory":
            sampler.pieces(epoch, 0)  # makes the order
        number = min(len(sampler), UPDATES - done)
        since = time.process_time()
        for update in range(number):
            sampler.pieces(epoch, update)
        spent += time.process_time() - since
        done += number
    return spent / UPDATES * 1e6


def order_bytes(kind: str, power: int) -> float:
    """Return the bytes that a sampler holds after a few updates."""
    tracemalloc.start()
    try:
        sampler = UpdateSampler(ORDERS[kind][0](10**power, 0), batch_size=BATCH)
        for update in (0, len(sampler) - 1, len(sampler) // 2):
            sampler.pieces(0, update)
        return float(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


class Marks(Callback):
    """Note the CPU's time and the process's memory at 900 and 1,000 updates, 9,000 and so on."""

    def __init__(self) -> None:
        self.places = {n * 10 ** (power - 1) for power in DECADES for n in (9, 10)}
        self.notes: list[tuple[int, float, int]] = []

    def on_update_end(self, trainer: Trainer) -> None:
        """Note them."""
        if (step := trainer.state.updates) in self.places:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self.notes.append((step, time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")))


class Output(Task):
    """The loss is what the network returns."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Return it."""
        loss: Tensor = model(batch)
        return loss


def run_costs() -> tuple[list[float], int]:
    """Return an update's cost at each decade of a run, and by how many bytes the last one grew."""
    model, marks = nn.Linear(1, 1, bias=False), Marks()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model,
            Output(),
            SGD(model.parameters(), lr=0.01),
            [torch.zeros(1)] * 10 ** DECADES[-1],
            callbacks={"board": TensorBoard(), "metrics": MetricsLog(), "marks": marks},
            options=TrainerOptions(max_steps=10 ** DECADES[-1], log_every_n_steps=50),
            run_dir=Path(folder),
        ).fit()
    pairs = zip(marks.notes[::2], marks.notes[1::2], strict=True)
    costs = [(end[1] - begin[1]) / (end[0] - begin[0]) * 1e6 for begin, end in pairs]
    return costs, marks.notes[-1][2] - marks.notes[-3][2]
