"""Rows of a table from Python, dicts and DataFrames, encoded like the file that a run read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from regimen.data.errors import DataError
from regimen.data.formats.table import Columns, Table
from regimen.data.transforms import Transform

Record = Mapping[str, Any]


def records_of(given: Any) -> list[Record] | None:
    """Return the rows of a DataFrame, of dicts or of one dict; None for anything else.

    A dict is one row, or with lists for values the columns of several rows. A DataFrame is any
    object that has `columns` and returns a column by its name, as those of pandas and Polars.
    """
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):
        names = [str(name) for name in given.columns]
        columns = [list(given[name]) for name in given.columns]
        return _transposed(names, columns)
    if isinstance(given, Mapping):
        if given and all(_is_column(value) for value in given.values()):
            return _transposed(list(given), [list(value) for value in given.values()])
        return [given]
    if isinstance(given, Sequence) and given and all(isinstance(row, Mapping) for row in given):
        return list(given)
    return None


def table_of(
    records: Iterable[Record],
    features: Sequence[Mapping[str, Any]],
    missing: Any,
    transform: Transform,
) -> Table:
    """Return rows as the samples of a run's data; columns that the run does not take are left out.

    features, missing: from the run's `inference.json`. None and NaN are missing values. Raises
    DataError for a row without one of the columns, and for a value that does not fit its column.
    """
    rows = list(records)
    cells: dict[str, list[str | None]] = {}
    for feature in features:
        name = feature["name"]
        for number, row in enumerate(rows):
            if name not in row:
                names = ", ".join(str(feature["name"]) for feature in features)
                raise DataError(
                    f"row {number} has no column {name!r}: the run takes the columns {names}"
                )
        cells[name] = [_cell(row[name], feature["categories"]) for row in rows]
    columns = Columns(Path("the rows"), cells, range(len(rows)))
    return Table(columns, features, missing, transform)


def _transposed(names: Sequence[str], columns: Sequence[Sequence[Any]]) -> list[Record]:
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise DataError(f"the columns have different lengths: {sorted(lengths)}")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _is_column(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _cell(value: Any, categories: Sequence[str] | None) -> str | None:
    """Return the text that a file has for a value; None for a missing value."""
    # `pandas.NA` cannot be compared, and NaN is not equal to itself.
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Real) and value != value:
        return None
    text = str(value)
    if not text.strip():  # an empty cell
        return None
    if categories is None or text in categories or not isinstance(value, Real):
        return text
    # pandas turns whole numbers into floats in a column with missing values.
    number = float(value)
    if number.is_integer() and str(int(number)) in categories:
        return str(int(number))
    return text
