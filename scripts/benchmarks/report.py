"""The result of a benchmark: a table for people, a file for machines."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.files.atomic import write_json
from trainer.summary.text import table, to_text


@dataclass(frozen=True, slots=True)
class Row:
    """One contender: its cost or speed, and that as a ratio to its reference."""

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
    plot: Sequence[str] = ()  # lines below the table

    def text(self, width: int = 100) -> str:
        """Return the table, with the headlines below."""
        cells = (
            (r.name, f"{r.value:.1f}", f"{r.lowest:.1f} .. {r.highest:.1f}", _ratio(r), r.reference)
            for r in self.rows
        )
        columns = ("contender", self.unit, "range", "ratio", "to")
        drawn = table(columns, cells, right=columns[1:4])
        headlines = [f"{name}: {value:.3f}" for name, value in self.headlines.items()]
        return to_text(self.title, drawn, *self.plot, *headlines, width=width)

    def write(self, folder: Path) -> Path:
        """Write `folder/<name>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {
            "name": self.name,
            **self.headlines,
            "unit": self.unit,
            "rows": [asdict(row) for row in self.rows],
            "settings": dict(self.settings),
            "machine": machine(),
        }
        write_json(path, content)
        return path


def bars(rows: Sequence[Row], width: int = 40) -> list[str]:
    """Draw each row's value as a bar, the longest of `width` characters."""
    longest = max(row.value for row in rows)
    name = max(len(row.name) for row in rows)
    return [f"{row.name:<{name}} {'▇' * round(row.value / longest * width)}" for row in rows]


def paired(
    name: str, own: Sequence[float], reference: str, others: Sequence[float]
) -> tuple[Row, float]:
    """Return a contender's row and its ratio: the median over the turns of own by other."""
    ratio = statistics.median(a / b for a, b in zip(own, others, strict=True))
    return Row(name, statistics.median(own), min(own), max(own), ratio, reference), ratio


def machine() -> dict[str, Any]:
    """Return what a figure depends on beside the code."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.3f}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as long as the context lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
