"""Columns of a CSV or Parquet file, and their encoding as numbers by training statistics."""

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data.errors import DataError

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "None", "?"})
_MOST_CATEGORIES = 1000

Numbers = npt.NDArray[np.float64]
RowNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Columns:
    """The cells of a file as text, by column; None where one is missing."""

    path: Path
    cells: dict[str, list[str | None]]
    first_row: int  # number of the first row, as a spreadsheet shows it

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()), []))

    def place(self, row: int, name: str) -> str:
        """Return where a cell is, for a message."""
        return f"{self.path}: row {self.first_row + row}, column {name!r}"

    def column(self, name: str, key: str) -> list[str | None]:
        """Return the column that a key of the configuration names. Raises DataError."""
        if name not in self.cells:
            known = ", ".join(map(repr, self.cells))
            raise DataError(f"{key}: {self.path} has no column {name!r}; it has {known}")
        return self.cells[name]


@dataclass(frozen=True, slots=True)
class Feature:
    """The encoding of a column: standardised numbers, or one-hot over categories."""

    name: str
    categories: tuple[str, ...] | None = None  # of the training rows; None: numbers
    mean: float = 0.0
    std: float = 1.0

    @property
    def width(self) -> int:
        """The number of inputs of the column."""
        return 1 if self.categories is None else len(self.categories)

    def encoded(self, columns: Columns, missing: str) -> Numbers:
        """Return the inputs [rows, width] of all rows, see `encoded` below."""
        if self.categories is None:
            values = numbers(columns, self.name, missing, "data.features")
            return np.nan_to_num((values - self.mean) / self.std)[:, None]
        cells = columns.column(self.name, "data.features")
        if missing == "error" and None in cells:
            place = columns.place(cells.index(None), self.name)
            raise DataError(
                f"{place}: no value; data.missing=mean takes it as none of the categories"
            )
        known = np.array(self.categories, dtype=object)
        found: Numbers = np.equal(np.array(cells, dtype=object)[:, None], known).astype(np.float64)
        return found


def read_columns(path: Path) -> Columns:
    """Read a whole file; the splits of a run share one reading. Raises DataError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror}") from error
    return _read(path, stat.st_mtime_ns, stat.st_size)


def fitted(
    columns: Columns, rows: RowNumbers, names: Sequence[str], categorical: Sequence[str] | None
) -> list[Feature]:
    """Return the encoding of columns, with the statistics of the training rows.

    categorical: the columns with categories; None: those whose first value is not a number.
    """
    for name in categorical or ():
        columns.column(name, "data.categorical")
    return [_feature(columns, rows, name, categorical) for name in names]


def encoded(
    columns: Columns, features: Sequence[Feature], missing: Literal["error", "mean"]
) -> npt.NDArray[np.float32]:
    """Return the inputs [rows, sum of the features' widths] of all rows.

    A missing number is the training mean with `missing="mean"`, a missing or unknown category is
    none of those known. Raises DataError, naming row and column.
    """
    parts = [feature.encoded(columns, missing) for feature in features]
    return np.concatenate(parts, axis=1).astype(np.float32)


def numbers(columns: Columns, name: str, missing: str, key: str) -> Numbers:
    """Return a column as numbers, NaN where a value is missing. Raises DataError."""
    found = np.empty(len(columns))
    for row, cell in enumerate(columns.column(name, key)):
        if cell is None and missing == "error":
            raise DataError(f"{columns.place(row, name)}: no value; data.missing=mean fills it in")
        value = math.nan if cell is None else _number(cell)
        if value is None or math.isinf(value):
            raise DataError(
                f"{columns.place(row, name)}: {cell!r} is not a finite number; name the column in "
                "data.categorical if it holds categories"
            )
        found[row] = value
    return found


def in_order(values: set[str]) -> list[str]:
    """Return names sorted, as numbers if all of them are."""
    try:
        return sorted(values, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(values)


def class_names(found: set[str], num_classes: int | None, samples: int, source: str) -> list[str]:
    """Return the names of the classes: numbers count from 0, names are sorted.

    Numbers are below `num_classes`, or the number of samples: one label sizes no list of names.
    """
    if not all(name.isdecimal() for name in found):
        return in_order(found)
    highest, most = max(map(int, found)), num_classes or samples
    if highest >= most:
        bound = "data.num_classes" if num_classes else "the number of samples of train"
        raise DataError(
            f"{source}: class number {highest} is not below {bound}, {most}: "
            "mend the labels or set data.num_classes"
        )
    return [str(number) for number in range(highest + 1)]


def _feature(
    columns: Columns, rows: RowNumbers, name: str, categorical: Sequence[str] | None
) -> Feature:
    cells = columns.column(name, "data.features")
    first = next((cell for cell in cells if cell is not None), "")
    chosen = _number(first) is None if categorical is None else name in categorical
    if chosen:
        categories = in_order({cell for row in rows if (cell := cells[row]) is not None})
        if len(categories) > _MOST_CATEGORIES:
            raise DataError(
                f"{columns.path}: column {name!r} has {len(categories)} categories, more than "
                f"{_MOST_CATEGORIES}: leave it out of data.features"
            )
        return Feature(name, tuple(categories))
    values = numbers(columns, name, "mean", "data.features")[rows]
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(f"{columns.path}: column {name!r} has no value in the training rows")
    return Feature(name, mean=float(known.mean()), std=float(known.std()) or 1.0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@functools.lru_cache(maxsize=3)  # train, val and test
def _read(path: Path, modified: int, size: int) -> Columns:
    if path.suffix not in SUFFIXES:
        raise DataError(f"data.path: {path} is none of {', '.join(SUFFIXES)}")
    columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if not len(columns):
        raise DataError(f"{path}: the table has no rows")
    return columns


def _csv(path: Path) -> Columns:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            names, *rows = [*csv.reader(file, delimiter=delimiter, strict=True)] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error
    _check_names(path, names)
    cells: dict[str, list[str | None]] = {name: [] for name in names}
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise DataError(f"{path}: row {number} has {len(row)} cells, the header {len(names)}")
        for name, cell in zip(names, row, strict=True):
            cells[name].append(None if cell.strip() in MISSING else cell.strip())
    return Columns(path, cells, 2)


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: two columns are named {twice!r}")
    if not names or "" in names:
        raise DataError(f"{path}: the first row must name every column")


def _parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise DataError("data.path: a .parquet file needs pyarrow: pip install pyarrow") from error
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    _check_names(path, table.column_names)
    cells = {name: [_text(v) for v in table[name].to_pylist()] for name in table.column_names}
    return Columns(path, cells, 1)


def _text(value: Any) -> str | None:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if missing else str(int(value) if isinstance(value, bool) else value)
