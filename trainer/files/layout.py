"""Text that is safe to print, and tables that fit."""

import csv
import io
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from regimen.conf.errors import one_line

WIDTH = 100  # characters of a line, where no terminal sets a limit
_GAP = "  "  # between columns


def is_dumb() -> bool:
    """Return whether the terminal, if there is one, cannot move its cursor."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def terminal_size(stream: Any) -> os.terminal_size:
    """Return columns and lines of a terminal now; 80 and 24 where they are unknown."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):  # a stream of Python's own, or a closed one
        columns = lines = 0
    return os.terminal_size((columns or 80, lines or 24))


def terminal_width(stream: Any) -> int | None:
    """Return the width of a terminal now; None for a file or a pipe, where nothing is folded."""
    return terminal_size(stream).columns if stream.isatty() else None


def wrap_items(items: Sequence[str], width: int, gap: str) -> list[str]:
    """Join items by `gap` into lines of at most `width` characters; a longer item has its own."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(gap) + len(item) <= width:
            lines[-1] += gap + item
        else:
            lines.append(item)
    return lines


def format_table(
    rows: Sequence[Sequence[str]], width: int, last: int = 0, right: Sequence[str] = ()
) -> list[str]:
    """Return rows as aligned lines of at most `width` characters; the first has the column names.

    Columns that do not fit are listed by name below their row; the `last` ones are kept longest.
    Columns named in `right` are aligned to the right.
    """
    table = [[one_line(cell) for cell in row] for row in rows]
    names = table[0]
    sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
    shown = list(range(len(names)))
    while len(shown) > 1 and sum(sizes[i] for i in shown) + len(_GAP) * (len(shown) - 1) > width:
        shown.pop(-1 - last if len(shown) > 1 + last else -1)

    lines = []
    for number, row in enumerate(table):
        cells = []
        hidden = []
        for i, cell in enumerate(row):
            if i not in shown:
                if cell:
                    hidden.append(f"{names[i]} {cell}")
            elif names[i] in right:
                cells.append(cell.rjust(sizes[i]))
            else:
                cells.append(cell.ljust(sizes[i]))
        lines.append(_GAP.join(cells).rstrip())
        if hidden and number > 0:
            words = ", ".join(hidden).split(" ")
            lines += [_GAP + line for line in wrap_items(words, width - len(_GAP), " ")]
    return lines


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def encodable(text: str) -> str:
    """Return a text that every encoding of Unicode can write: lone surrogates become `\\ud800`.

    JSON may hold them, and Python reads file names that are not UTF-8 with them.
    """
    return text.encode(errors="backslashreplace").decode()


def as_bytes(text: str) -> bytes:
    """Return any text as UTF-8; surrogates that stand for bytes of a file name are these bytes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return encodable(text).encode()


def escape_controls(text: str) -> str:
    """Escape control characters, which could control a terminal, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def indented_lines(text: str) -> list[str]:
    """Return the lines of an error's text, of which all but the first are indented.

    A line break before an unindented line is part of a value, such as a file name: it is escaped.
    """
    return escape_controls(re.sub(r"\n(?!  )", r"\\n", text)).split("\n")


class VisibleFormatter(logging.Formatter):
    """Format as the base class does, and escape control characters, and line breaks in paths."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record, which may have several lines."""
        record = logging.makeLogRecord(record.__dict__)
        if isinstance(record.args, tuple):
            record.args = tuple(one_line(a) if isinstance(a, Path) else a for a in record.args)
        return escape_controls(super().format(record))


def count(value: float | None) -> str:
    """Format a number with three digits and a unit prefix: 11.2 M; `?` for None."""
    if value is None:
        return "?"
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"


def size(value: float | None) -> str:
    """Format a number of bytes: 42.6 MiB; `?` for None."""
    if value is None:
        return "?"
    if value < 1024:
        return f"{value:.0f} B"
    power = min((int(value).bit_length() - 1) // 10, 4)
    return f"{value / 1024**power:.1f} {'KMGT'[power - 1]}iB"
