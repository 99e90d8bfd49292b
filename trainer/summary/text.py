"""Tables and numbers as text: plain for files, coloured for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trainer.files.layout import folded, on_one_line, visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


_LONGEST = 30  # characters of a word that is not broken in a table


def count(value: int | float | None) -> str:
    """Format a number with three digits and a unit prefix: 11.2 M; `?` for None."""
    if value is None:
        return "?"
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def size(value: int | None) -> str:
    """Format a number of bytes: 42.6 MiB; `?` for None."""
    if value is None:
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> Table:
    """Return a table without borders; the columns in `right` are right-aligned."""
    # Imported here, because the import of rich takes 0.1 s.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    cells = [[on_one_line(cell) for cell in row] for row in rows]
    for name, *column in zip(columns, *cells, strict=True):
        words = [word for cell in (name, *column) for word in cell.split()]
        drawn.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            min_width=min(max(map(len, words), default=1), _LONGEST),
        )
    for row in cells:
        drawn.add_row(*map(Text, row))
    return drawn


def natural_width(drawn: Table) -> int:
    """Return how many columns of a terminal a table takes where no cell is folded."""
    from rich.console import Console

    return Console(width=10_000).measure(drawn).maximum


def to_text(*parts: RenderableType, width: int = 100, colour: bool = False) -> str:
    """Render parts below each other, without trailing spaces and repeated empty lines."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, no_color=not colour, highlight=False
    )
    for part in parts:
        # As Text, so that brackets in an error or a name are not parsed as markup.
        console.print(Text(folded(visible(part), width, "")) if isinstance(part, str) else part)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    single = [line for line, above in zip(lines, ["", *lines], strict=False) if line or above]
    return "\n".join(single) + "\n"
