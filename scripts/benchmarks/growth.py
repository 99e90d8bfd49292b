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

import itertools
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from callbacks.metrics_log import MetricsLog
from callbacks.tensorboard import TensorBoard
from data.orders import Permuted, Shuffled
from data.updates import Order, UpdateSampler
from scripts.benchmarks.report import Report, Row, bars, one_thread
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.task import Task
from trainer.trainer import Trainer

BATCH = 128
UPDATES = 1024  # one after the other, that are timed
SMALLEST = 10**4
MOST_ROUNDS = 5  # an order of 10^7 samples takes a second to make
DECADES = range(3, 7)  # a run's cost is taken at 10^3 to 10^6 updates
ORDERS: dict[str, tuple[Callable[[int, int], Order], range]] = {
    "in memory": (Shuffled, range(4, 8)),
    "low_memory": (Permuted, range(4, 9)),
}


def measure(rounds: int) -> Report:
    """Time the updates of every order and size `rounds` times, at most 5, in turn; then a run."""
    cases = [(kind, 10**power) for kind, (_, powers) in ORDERS.items() for power in powers]
    costs: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(min(rounds, MOST_ROUNDS)):
        for case in cases:
            costs[case].append(_cost(*case))
    memory = {f"{kind}, 10^{_power(n)}": _memory(kind, n) for kind, n in cases}
    rows = [_row(case, costs) for case in cases]
    marks = _run()
    run_rows = list(marks.rows())
    return Report(
        name="growth",
        title=f"An update's samples, batches of {BATCH}, and a run's updates, as they grow",
        unit="µs",
        rows=[*rows, *run_rows],
        headlines={
            "ratio_to_smallest": max(row.ratio or 0.0 for row in rows),
            "bytes_a_sample_in_memory": memory["in memory, 10^7"] / 10**7,
            "bytes_in_all_low_memory": memory["low_memory, 10^8"],
            "run_ratio_to_first_decade": run_rows[-1].ratio or 0.0,
            "run_growth_mib": marks.growth / 2**20,
        },
        settings={"rounds": min(rounds, MOST_ROUNDS), "updates": UPDATES, "bytes": memory},
        plot=[*bars(rows), *bars(run_rows)],
    )


@dataclass(slots=True)
class Marks(Callback):
    """Note the CPU's time and the process's memory at 900 and 1,000 updates, 9,000 and so on."""

    places: Container[int]
    notes: list[tuple[int, float, int]] = field(default_factory=list)

    def on_update_end(self, trainer: Trainer) -> None:
        """Note them."""
        step = trainer.state.updates
        if step in self.places:
            self.notes.append((step, time.process_time(), _resident()))

    @property
    def growth(self) -> int:
        """Return by how many bytes the process grew from 10^5 to 10^6 updates."""
        return self.notes[-1][2] - self.notes[-3][2]

    def rows(self) -> Iterator[Row]:
        """Yield the cost of an update at the end of each decade."""
        pairs = zip(self.notes[::2], self.notes[1::2], strict=True)
        costs = [(end[1] - begin[1]) / (end[0] - begin[0]) * 1e6 for begin, end in pairs]
        for power, cost in zip(DECADES, costs, strict=True):
            name = f"a run at 10^{power}"
            yield Row(name, cost, cost, cost, cost / costs[0], f"a run at 10^{DECADES[0]}")


class _Weight(nn.Module):
    """A network with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


class _Output(Task):
    """The loss is what the network returns."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch)
        return loss


class _Batches:
    """The same batch without end."""

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.zeros(()))


def _run() -> Marks:
    model = _Weight()
    marks = Marks(frozenset(n * 10 ** (p - 1) for p in DECADES for n in (9, 10)))
    with tempfile.TemporaryDirectory() as folder, one_thread():
        Trainer(
            model,
            _Output(),
            SGD(model.parameters(), lr=0.01),
            _Batches(),
            callbacks={"board": TensorBoard(), "metrics": MetricsLog(), "marks": marks},
            options=TrainerOptions(max_steps=10 ** DECADES[-1], log_every_n_steps=50),
            run_dir=Path(folder),
        ).fit()
    return marks


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cost(kind: str, samples: int) -> float:
    """Return the mean time of an update in microseconds."""
    sampler = UpdateSampler(ORDERS[kind][0](samples, 0), batch_size=BATCH)
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


def _memory(kind: str, samples: int) -> float:
    """Return the bytes that a sampler holds after a few updates."""
    tracemalloc.start()
    try:
        sampler = UpdateSampler(ORDERS[kind][0](samples, 0), batch_size=BATCH)
        for update in (0, len(sampler) - 1, len(sampler) // 2):
            sampler.pieces(0, update)
        return float(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def _row(case: tuple[str, int], costs: dict[tuple[str, int], list[float]]) -> Row:
    own, first = costs[case], costs[case[0], SMALLEST]
    ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
    name, reference = (f"{case[0]}, 10^{_power(n)}" for n in (case[1], SMALLEST))
    return Row(name, statistics.median(own), min(own), max(own), ratio, reference)


def _power(samples: int) -> int:
    return len(str(samples)) - 1
