"""Runs as a table, and two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scripts.history.differences import at, differences, shown, varied
from scripts.history.entry import RunEntry, results
from trainer.files.log_format import on_one_line
from trainer.summary.text import size

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 8  # differences in a row of the table; --json has all


def rows_of(runs: Sequence[RunEntry]) -> list[list[str]]:
    """Return the table of `regimen runs`: rows, the first with the names of the columns."""
    columns = ["run", "status", "epoch", "best", "duration", "size", "differs in"]
    rows = [columns]
    for run, changed in zip(runs, differences(runs), strict=True):
        words = [f"{key}={shown(value)}" for key, value in changed.items()]
        more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
        cells = [_epoch(run), _best(run), duration(run.seconds), size(run.size)]
        rows.append([str(run.path), run.state, *cells, " ".join(words[:_SHOWN] + more)])
    return rows


def compared(left: RunEntry, right: RunEntry) -> dict[str, dict[str, list[Any]]]:
    """Return what two runs differ in, and the metrics of both: pairs by name."""
    facts: dict[str, list[Any]] = {
        "status": [left.state, right.state],
        "seconds": [left.seconds, right.seconds],
    }
    keys = list(varied([left.config, right.config], deep=True))
    config = {key: [at(left.config, key), at(right.config, key)] for key in keys}
    both = results(left.path), results(right.path)
    names = dict.fromkeys([*both[0], *both[1]])
    metrics = {name: [both[0].get(name), both[1].get(name)] for name in names}
    return {"run": facts, "config": config, "metrics": metrics}


def comparison(left: RunEntry, right: RunEntry, names: Sequence[str]) -> list[list[str]]:
    """Return the table of `regimen runs diff`, as rows; `names` are those of the two runs."""
    pairs = compared(left, right)
    seconds = pairs["run"].pop("seconds")
    rows = [["", *names], ["status", *pairs["run"]["status"]]]
    rows.append(["duration", *map(duration, seconds)])
    rows += [[key, *map(shown, pair)] for key, pair in pairs["config"].items()]
    rows += [[name, *map(_number, pair)] for name, pair in pairs["metrics"].items()]
    return rows


def differing(runs: Sequence[RunEntry]) -> list[Mapping[str, Any]]:
    """Return what `--json` prints: each run with its values of the keys that differ."""
    pairs = zip(runs, differences(runs), strict=True)
    return [run.as_json() | {"differs": changed} for run, changed in pairs]


def duration(seconds: float | None) -> str:
    """Return seconds as `1h 02m`, `3m 20s` or `7.5s`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def _epoch(run: RunEntry) -> str:
    if run.epoch is None:
        return ""
    return f"{run.epoch}/{run.max_epochs}" if run.max_epochs else str(run.epoch)


def _best(run: RunEntry) -> str:
    return "" if run.best is None else f"{run.best[0]} {_number(run.best[1])}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """Return rows, the first of which names the columns, as a table."""
    # rich is slow to import, and --json and --help do not need it
    from rich.markup import escape
    from rich.table import Table

    table = Table(highlight=False)
    for number, name in enumerate(rows[0]):  # the first can be copied: a path, a key
        table.add_column(escape(on_one_line(name)), overflow="fold", no_wrap=number == 0)
    for row in rows[1:]:
        table.add_row(*(escape(on_one_line(cell)) for cell in row))
    return table
