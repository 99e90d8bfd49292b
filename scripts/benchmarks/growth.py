"""What grows with the data set: the time and the memory that an update's samples take.

Orders in memory (8 bytes a sample), and computed position by position (`loader/sampler=low_memory`,
which sets of 10^8 samples and more have by themselves). The clock runs over updates all over an
epoch, after the first, for which the order in memory is made; memory is what is held in the end. A
computed order walks until it is inside the set: up to four steps on average, by the set's size.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

from data.orders import Permuted, Shuffled
from data.updates import Order, UpdateSampler
from scripts.benchmarks.report import Report, Row

BATCH = 128
UPDATES = 200  # of an epoch that are timed
SMALLEST = 10**4
MOST_ROUNDS = 5  # an order of 10^7 samples takes a second to make
ORDERS: dict[str, tuple[Callable[[int, int], Order], range]] = {
    "in memory": (Shuffled, range(4, 8)),
    "low_memory": (Permuted, range(4, 9)),
}


def measure(rounds: int) -> Report:
    """Time the updates of every order and size `rounds` times, at most 5, in turn."""
    cases = [(kind, 10**power) for kind, (_, powers) in ORDERS.items() for power in powers]
    costs: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(min(rounds, MOST_ROUNDS)):
        for case in cases:
            costs[case].append(_cost(*case))
    memory = {f"{kind}, 10^{_power(n)}": _memory(kind, n) for kind, n in cases}
    rows = [_row(case, costs) for case in cases]
    return Report(
        name="growth",
        title=f"An update's samples, batches of {BATCH}, as the data set grows",
        unit="µs",
        rows=rows,
        headlines={
            "ratio_to_smallest": max(row.ratio or 0.0 for row in rows),
            "bytes_a_sample_in_memory": memory["in memory, 10^7"] / 10**7,
            "bytes_in_all_low_memory": memory["low_memory, 10^8"],
        },
        settings={"rounds": min(rounds, MOST_ROUNDS), "updates": UPDATES, "bytes": memory},
    )


def _cost(kind: str, samples: int) -> float:
    """Return the median time of an update in microseconds."""
    sampler = UpdateSampler(ORDERS[kind][0](samples, 0), batch_size=BATCH)
    sampler.pieces(0, 0)
    times = []
    for number in range(UPDATES):
        update = number * 7919 % len(sampler)
        since = time.process_time()
        sampler.pieces(0, update)
        times.append(time.process_time() - since)
    return statistics.median(times) * 1e6


def _memory(kind: str, samples: int) -> float:
    """Return the bytes that a sampler holds after a few updates."""
    tracemalloc.start()
    try:
        sampler = UpdateSampler(ORDERS[kind][0](samples, 0), batch_size=BATCH)
        for update in (0, len(sampler) // 2, len(sampler) - 1):
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
