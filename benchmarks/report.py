"""What the benchmarks share: contenders in turn, ratios within a turn, the table and the file.

It imports torch and the standard library only, so that a script by hand may stand beside it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

BY_HAND, OURS = "by hand", "Regimen"
T = TypeVar("T")


class Cost(NamedTuple):
    """What a contender took, or its rate: by the clock, and by the CPU's time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender: its median, and that as a ratio to its reference."""

    name: str
    value: float
    lowest: float
    highest: float
    ratio: float | None = None
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, in `unit`; `headlines` are the figures to remember."""

    name: str
    title: str
    unit: str
    rows: Sequence[Row]
    headlines: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the table, with the headlines below."""
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [self.title, f"{'':{width}} {self.unit:>12}"]
        for row in self.rows:
            limits = f"{row.lowest:.1f} .. {row.highest:.1f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.3f} of {row.reference}"
            lines.append(f"{row.name:{width}} {row.value:12.1f}   {limits:>22}   {ratio}".rstrip())
        return "\n".join([*lines, *(f"{k}: {v:.3f}" for k, v in self.headlines.items())])

    def write(self, folder: Path) -> Path:
        """Write `folder/<name>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            **self.headlines,
            "unit": self.unit,
            "rows": [asdict(row) for row in self.rows],
            "settings": dict(self.settings),
            "machine": machine(),
        }
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path


def in_turn(
    contenders: Mapping[str, Callable[[], T]], rounds: int, uncounted: int = 1
) -> dict[str, list[T]]:
    """Run the contenders A B A B; return what each turn of each gave, without the first turns."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for turn in range(rounds + uncounted):
        for name, run in contenders.items():
            value = run()
            if turn >= uncounted:
                found[name].append(value)
    return found


def paired(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the turns of one by the other: the machine may drift between turns."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def compared(values: Mapping[str, Sequence[float]], references: Mapping[str, str]) -> list[Row]:
    """Return a row for each contender, with a ratio where it has a reference."""
    rows = []
    for name, own in values.items():
        to = references.get(name, "")
        ratio = paired(own, values[to]) if to else None
        rows.append(Row(name, statistics.median(own), min(own), max(own), ratio, to))
    return rows


def by_clock(costs: Mapping[str, Sequence[Cost]]) -> dict[str, list[float]]:
    """Return what the clock says."""
    return {name: [cost.wall for cost in own] for name, own in costs.items()}


def by_cpu(costs: Mapping[str, Sequence[Cost]]) -> dict[str, list[float]]:
    """Return what the CPU's time says, which other processes change less."""
    return {name: [cost.cpu for cost in own] for name, own in costs.items()}


def children_cpu() -> float:
    """Return the CPU seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as long as the context lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Terminal(io.StringIO):
    """A terminal that no one looks at: bars draw themselves on it as on any."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True

    def write(self, text: str) -> int:
        """Forget the text."""
        return len(text)


def machine() -> dict[str, Any]:
    """Return what a figure depends on beside the code."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
