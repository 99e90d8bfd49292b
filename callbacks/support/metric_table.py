"""Metrics in aligned columns, a row at a time, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_GAP = "  "
_NUMBER = 9  # characters of a value such as 1.234e-05
_MARK = "*"
_LEAD, _LAST = ("epoch", "step", "best"), "time"


class Row(NamedTuple):
    """Where a run is, and its metrics there."""

    epoch: str
    step: int
    values: Mapping[str, float]
    seconds: str = ""
    best: bool = False  # of all rows so far


class MetricTable:
    """Lays out rows below a header, which comes again where columns change, or every screenful.

    What does not fit the width goes on in a further line of the header and of each row; the time
    is left out before that.
    """

    def __init__(self, epoch: str, steps: int | None, marks_best: bool) -> None:
        self._lead = [name for name in _LEAD if marks_best or name != "best"]
        self._widths: dict[str, int] = {}
        for name, text in zip(
            (*_LEAD, _LAST), (epoch, str(steps or 0), "", "0:00:00"), strict=True
        ):
            self._widen(name, text)
        self._metrics: list[str] = []
        self._header: list[str] = []
        self._rows = 0  # lines below the header

    def lines(self, row: Row, width: int, height: int) -> list[str]:
        """Return a row as lines of a terminal of this size, with the header where it is due."""
        self._metrics = sorted({*self._metrics, *row.values})
        cells = self._cells(row)
        for name, text in cells.items():
            self._widen(name, text, _NUMBER if name in self._metrics else 0)
        layout = self._layout(width)
        header = self._drawn(layout, {name: name for name in self._widths})
        shown = self._drawn(layout, cells)
        if header != self._header or self._rows + len(shown) > height - len(header) - 3:
            self._header, self._rows = header, 0
        above = [] if self._rows else header
        self._rows += len(shown)
        return [*above, *shown]

    def _widen(self, name: str, text: str, least: int = 0) -> None:
        self._widths[name] = max(self._widths.get(name, len(name)), len(text), least)

    def _cells(self, row: Row) -> dict[str, str]:
        lead = {"epoch": row.epoch, "step": str(row.step), "best": _MARK if row.best else ""}
        values = {n: f"{row.values[n]:.4g}" if n in row.values else "" for n in self._metrics}
        return {**lead, **values, _LAST: row.seconds}

    def _layout(self, width: int) -> list[list[str]]:
        """Return the columns of each line."""
        plain = [*self._lead, *self._metrics]
        for columns in ([*plain, _LAST], plain):
            if self._length(columns) <= width:
                return [columns]
        lines = [list(self._lead)]
        margin = self._length(self._lead) + len(_GAP)
        for name in (*self._metrics, _LAST):
            taken = self._length(lines[-1]) + (margin if len(lines) > 1 else 0)
            if taken + len(_GAP) + self._widths[name] <= width or lines == [self._lead]:
                lines[-1].append(name)
            else:
                lines.append([name])
        return lines

    def _length(self, columns: Sequence[str]) -> int:
        return sum(self._widths[name] for name in columns) + len(_GAP) * (len(columns) - 1)

    def _drawn(self, layout: Sequence[Sequence[str]], cells: Mapping[str, str]) -> list[str]:
        lines = [
            _GAP.join(cells[name].rjust(self._widths[name]) for name in columns)
            for columns in layout
        ]
        margin = " " * (self._length(self._lead) + len(_GAP))
        return [line.rstrip() for line in [lines[0], *(f"{margin}{line}" for line in lines[1:])]]
