"""What the benchmarks share: contenders in turn, ratios within a turn, the table and the file.

It imports torch and the standard library only, so that a script by hand may stand beside it.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, NamedTuple, TypeVar

import torch

BY_HAND, OURS, BARE = "by hand", "Regimen", "bare loop"
Values = Mapping[str, Sequence[float]]  # of each contender, one for each turn
T = TypeVar("T")


class Cost(NamedTuple):
    """What a contender took, or its rate: by the clock, and by the CPU's time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, in `unit`; `headlines` are the figures to remember.

    references: the contenders that others are compared with, beside those that `ratios` knows.
    """

    title: str
    unit: str
    values: Values
    headlines: Mapping[str, float]
    references: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return the median of each contender, and that as a ratio to its reference."""
        references = {**by_name(self.values), **self.references}
        ratio = ratios(self.values, references)
        return [
            {"name": name, "value": statistics.median(own), "lowest": min(own), "highest": max(own)}
            | {"ratio": ratio.get(name), "reference": references.get(name, "")}
            for name, own in self.values.items()
        ]

    def text(self) -> str:
        """Return the table, with the headlines below."""
        width = max(map(len, self.values), default=0)
        lines = [self.title, f"{'':{width}} {self.unit:>12}"]
        for row in self.rows():
            limits = f"{row['lowest']:.1f} .. {row['highest']:.1f}"
            line = f"{row['name']:{width}} {row['value']:12.1f}   {limits:>22}"
            compared = row["ratio"] and f"   {row['ratio']:.3f} of {row['reference']}"
            lines.append(line + (compared or ""))
        return "\n".join([*lines, *(f"{k}: {v:.3f}" for k, v in self.headlines.items())])

    def write(self, path: Path, rounds: int) -> None:
        """Write the JSON of a benchmark, with what a figure depends on beside the code."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cpuinfo = Path("/proc/cpuinfo")  # of Linux
        facts = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        named = (line.partition(":")[2].strip() for line in facts if line.startswith("model name"))
        kind = torch.accelerator.current_accelerator(check_available=True)
        machine = {
            **{"python": platform.python_version(), "torch": str(torch.__version__)},
            **{"processor": next(named, platform.processor()), "cores": os.cpu_count()},
            "device": torch.get_device_module(kind).get_device_name() if kind else "cpu",
        }
        content = {"name": path.stem, **self.headlines, "unit": self.unit, "rows": self.rows()}
        content |= {"settings": {"rounds": rounds, **self.settings}, "machine": machine}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def in_turn(
    contenders: Mapping[str, Callable[[], T]], rounds: int, uncounted: int = 1
) -> dict[str, list[T]]:
    """Run the contenders A B A B; return what each turn of each gave, without the first turns."""
    turns = [{name: run() for name, run in contenders.items()} for _ in range(rounds + uncounted)]
    return {name: [turn[name] for turn in turns[uncounted:]] for name in contenders}


def split(costs: Mapping[str, Sequence[Cost]]) -> tuple[Values, Values]:
    """Return what the clock says, and the CPU's time, which other processes change less."""
    wall, cpu = ({name: [c[i] for c in own] for name, own in costs.items()} for i in (0, 1))
    return wall, cpu


def paired(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the turns of one by the other: the machine may drift between turns."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def by_name(values: Values) -> dict[str, str]:
    """Return for each of our contenders the one by hand, or the bare one, of the same name."""
    pairs = ((name, name.replace(OURS, to)) for name in values for to in (BY_HAND, BARE))
    return {name: other for name, other in pairs if other != name and other in values}


def ratios(values: Values, references: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return the ratio of each contender to its reference, or to that of the same name."""
    known = {**by_name(values), **(references or {})}
    return {name: paired(values[name], values[to]) for name, to in known.items()}


def now() -> Cost:
    """Return what the clock and the CPU's time of this process say."""
    return Cost(time.perf_counter(), time.process_time())


def typical(stamps: Sequence[Cost]) -> Cost:
    """Return the median of the times between stamps: a neighbour's work is in few of them."""
    wall, cpu = (statistics.median(b[i] - a[i] for a, b in pairwise(stamps)) for i in (0, 1))
    return Cost(wall, cpu)


def rate(samples: int, work: Callable[..., object], *args: object) -> float:
    """Return samples a second by the CPU's time of some work."""
    since = time.process_time()
    work(*args)
    return samples / (time.process_time() - since)


def children_cpu() -> float:
    """Return the CPU seconds of all processes that have ended below this one."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
