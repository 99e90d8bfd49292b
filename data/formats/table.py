"""Tables from CSV and Parquet files: rows of features, and a number or a class to predict."""

import bz2
import csv
import gzip
import logging
import lzma
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.errors import DataError, as_data_error, check_regular, import_package, no_column
from regimen.data.keys import Indices
from regimen.data.sources import TensorSamples
from regimen.data.splits import Split, sort_names, split_file, stratified_split, train_and_val
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_OPENERS: Mapping[str, Callable[..., IO[str]]] = {
    "": open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_TEXT_SUFFIXES = tuple(kind + packed for kind in (".csv", ".tsv") for packed in _OPENERS)
SUFFIXES = (*_TEXT_SUFFIXES, ".parquet")
# Cells without a value: the marks of pandas, and a question mark.
MISSING = frozenset(
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"}
    | {"<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "?"}
)
# A missing number in a column of numbers; elsewhere these may be names of categories.
_MISSING_NUMBER = frozenset({"-", "--", ".", "*", "na", "n.a.", "N.A.", "none", "missing"})
_DELIMITERS = (",", ";", "\t", "|")
# A number in another spelling than the file's: `1,000.5`, `12%`, `3,5`, `1 000`.
_MISSPELT_NUMBER = re.compile(
    r"[+-]?[$€£]?\s?\d[\d.,' \u00a0\u202f]*(e[+-]?\d+)?\s?[%$€£]?", re.IGNORECASE
)
# Names of a column of row numbers: without a name, as pandas reads it, as Arrow writes it.
_ARROW_INDEX = "__index_level_0__"
_ROW_NUMBERS = ("", "Unnamed: 0", _ARROW_INDEX)

Missing = Literal["error", "mean"]
Numbers = NDArray[np.float64]
Cells = list[str | None]
# How a column becomes inputs, as plain values, which checkpoints and `inference.json` keep: its
# `name`; `categories`, one input for each, or None for numbers; the numbers' `mean` and `std`.
Feature = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a text file is written.

    delimiter: separates cells; None: one of `, ; tab |`, whichever splits the header.
    decimal, thousands: the decimal point, and the character between groups of three digits.
    encoding: None: UTF-8, or UTF-16 if the file begins with its byte order mark.
    """

    delimiter: str | None = None
    decimal: str = "."
    thousands: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        for name in ("delimiter", "decimal", "thousands"):
            value = getattr(self, name)
            if value is not None and len(value) != 1:
                raise DataError(f"data.{name}={value!r}: give one character")
        if self.decimal == self.thousands:
            raise DataError(f"data.decimal and data.thousands are both {self.decimal!r}")

    def parse(self, cell: str) -> float | None:
        """Return the number that a cell holds, or None."""
        if self.thousands is not None and self.thousands in cell:
            group = re.escape(self.thousands)
            point = re.escape(self.decimal)
            if not re.fullmatch(rf"[+-]?\d{{1,3}}({group}\d{{3}})+({point}\d*)?", cell):
                return None
            cell = cell.replace(self.thousands, "")
        # Python reads 1_000 as a number, and no other program does.
        if any(sign in cell for sign in "_." if sign != self.decimal):
            return None
        try:
            return float(cell.replace(self.decimal, "."))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Columns:
    """The cells of a file as text, by column; None where one is missing."""

    path: Path
    cells: dict[str, Cells]
    lines: Sequence[int]  # numbers of the rows, as a spreadsheet shows them
    dialect: Dialect = Dialect()

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int, name: str) -> str:
        """Return where a cell is, for a message."""
        return f"{self.path}: row {self.lines[row]}, column {name!r}"

    def column(self, name: str, key: str) -> Cells:
        """Return the column that a key of the configuration names. Raises DataError."""
        column = self.cells.get(name, self.cells.get(name.strip()))
        if column is None:
            raise no_column(key, self.path, name, self.cells)
        return column

    def holds_numbers(self, name: str) -> bool:
        """Return whether at least half of a column's values are numbers.

        Raises DataError if they are numbers in another spelling than the file's.
        """
        cells = self.column(name, "data.features")
        numbers = 0
        texts = 0
        misspelt = list[str]()
        for cell in cells:
            if cell is None or cell in _MISSING_NUMBER:
                continue
            if self.dialect.parse(cell) is not None:
                numbers += 1
            elif _MISSPELT_NUMBER.fullmatch(cell):
                misspelt.append(cell)
            else:
                texts += 1
        if numbers >= texts + len(misspelt):
            return numbers > 0
        if not misspelt or numbers + len(misspelt) < texts:
            return False
        cell = misspelt[0]
        raise DataError(
            f"{self.place(cells.index(cell), name)}: {cell!r} is written like a number, as most of "
            "the column is, and cannot be read as one: \"data.decimal=','\" or "
            "\"data.thousands=','\" says how numbers are written; if they are categories: "
            f"data.categorical=[{name}]"
        )

    def numbers(self, name: str, missing: Missing, key: str) -> Numbers:
        """Return a column as numbers, NaN where a value is missing. Raises DataError."""
        values = np.full(len(self), math.nan)
        for row, cell in enumerate(self.column(name, key)):
            if cell is None or cell in _MISSING_NUMBER:
                if missing == "error":
                    raise DataError(
                        f"{self.place(row, name)}: no value; data.missing=mean fills it in"
                    )
                continue
            number = self.dialect.parse(cell)
            if number is None or not math.isfinite(number):
                option = "data.target_kind=class" if key == "data.target" else "data.categorical"
                raise DataError(
                    f"{self.place(row, name)}: {cell!r} is not a finite number: mend the cell; "
                    "data.decimal and data.thousands say how numbers are written, and "
                    f"{option} that a column holds categories"
                )
            values[row] = number
        return values

    def encoded(self, feature: Feature, missing: Missing) -> Numbers:
        """Return the inputs [rows, 1 or categories] of a column. Raises DataError.

        With `missing="mean"` a missing number becomes the training mean. A missing or unknown
        category is encoded as zeros.
        """
        name = feature["name"]
        categories = feature["categories"]
        if categories is None:
            values = self.numbers(name, missing, "data.features")
            scaled = (values - float(feature["mean"])) / float(feature["std"])
            return np.nan_to_num(scaled)[:, None]
        cells = self.column(name, "data.features")
        if missing == "error" and None in cells:
            raise DataError(
                f"{self.place(cells.index(None), name)}: no value; data.missing=mean takes it as "
                "none of the categories"
            )
        column = np.array(cells, dtype=object)
        matches: NDArray[np.bool_] = np.equal(column[:, None], np.array(categories, dtype=object))
        return matches.astype(np.float64)


def read_columns(
    path: str | Path, dialect: Dialect | None = None, missing: Collection[str] = MISSING
) -> Columns:
    """Read a whole file. `missing`: the cells of a text file without a value. Raises DataError."""
    path = Path(path).expanduser()
    file_name = path.name.lower()
    if not file_name.endswith(SUFFIXES):
        raise DataError(f"data.path: {path} is none of {', '.join(SUFFIXES)}")
    check_regular(path)
    dialect = dialect or Dialect()
    if file_name.endswith(".parquet"):
        form = "parquet"
        dialect = Dialect()
    else:
        form = "csv" if ".csv" in file_name else "tsv"
    # What Arrow, csv and the modules of compressed files raise.
    errors = (OSError, ValueError, NotImplementedError, EOFError, csv.Error, zlib.error)
    with as_data_error(f"{path}: cannot be read as {form}", *errors, lzma.LZMAError):
        if form == "parquet":
            names, columns, lines = _read_parquet(path)
        else:
            default = "\t" if form == "tsv" else ","
            names, columns, lines = _read_text(path, default, dialect, missing)

    cells = dict[str, Cells]()
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        if not name and not any(column):
            continue  # a delimiter at the end of each line makes an empty column
        # A first column without a name holds the numbers of the rows.
        if name in cells or (not name and position > 0):
            raise DataError(
                f"{path}: each column needs a name of its own, in the first row: {names}"
            )
        cells[name] = column
    if not names:
        raise DataError(f"{path}: each column needs a name of its own, in the first row")
    if not lines:
        raise DataError(f"{path}: the table has no rows")
    return Columns(path, cells, lines, dialect)


def _read_text(
    path: Path, default_delimiter: str, dialect: Dialect, missing: Collection[str]
) -> tuple[list[str], list[Cells], list[int]]:
    """Return the names of the columns, their cells, and the line number of each row."""
    opener = _OPENERS.get(path.suffix.lower(), open)
    try:
        encoding = dialect.encoding
        if encoding is None:
            encoding = _detect_encoding(path, opener)
        with opener(path, "rt", newline="", encoding=encoding) as file:
            text = file.readlines()
    except UnicodeError as error:
        raise DataError(
            f"{path}: its text is not {dialect.encoding or 'UTF-8'} ({error}): data.encoding says "
            "what it is, such as data.encoding=cp1252 or latin-1"
        ) from error
    except LookupError as error:
        raise DataError(f"data.encoding={dialect.encoding}: Python has no such encoding") from error
    header = next((line for line in text if line.strip()), "")
    delimiter = dialect.delimiter or _detect_delimiter(path, header, default_delimiter)

    rows = list[list[str]]()
    lines = list[int]()
    for line, row in enumerate(csv.reader(text, delimiter=delimiter, strict=True), 1):
        cells = [cell.strip() for cell in row]
        if cells not in ([], [""]):  # an empty line is no row
            rows.append(cells)
            lines.append(line)
    while rows and not any(rows[-1]):  # spreadsheets leave rows of empty cells at the end
        rows.pop()
        lines.pop()
    names = rows[0] if rows else []
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(
                f"row {line} has {len(row)} cells, the header {len(names)} (separated by "
                f"{delimiter!r}: data.delimiter says by what they are)"
            )
    columns: list[Cells] = [[] for _ in names]
    for row in rows[1:]:
        for column, cell in zip(columns, row, strict=True):
            column.append(None if cell in missing else cell)
    return names, columns, lines[1:]


def _detect_encoding(path: Path, opener: Callable[..., IO[Any]]) -> str:
    with opener(path, "rb") as file:
        start = file.read(2)
    return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _detect_delimiter(path: Path, header: str, default: str) -> str:
    """Return the delimiter between the names of a header. Raises DataError if several could be."""
    splitting = []
    for delimiter in _DELIMITERS:
        if len(next(csv.reader([header], delimiter=delimiter), [])) > 1:
            splitting.append(delimiter)
    if default in splitting or not splitting:
        return default
    if len(splitting) > 1:
        raise DataError(
            f"{path}: each of {splitting} separates names in its first row: data.delimiter says "
            "which it is"
        )
    logger.info("%s: its cells are separated by %r", path, splitting[0])
    return splitting[0]


def _read_parquet(path: Path) -> tuple[list[str], list[Cells], Sequence[int]]:
    table = import_package("pyarrow.parquet", "parquet").read_table(path)
    columns: list[Cells] = [list(map(as_text, column.to_pylist())) for column in table.columns]
    return table.column_names, columns, range(1, len(table) + 1)


def as_text(value: Any) -> str | None:
    """Return a value as a text file has it; None if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


class Table(TensorSamples):
    """Rows of a table: samples are float32 [features], or (features, target) with `targets`.

    A target is a float32 value, or a class number if there are `classes`.
    rows: the rows of `columns` that are the samples; None: all. targets: of each row of `columns`.
    target_scale: (mean, std) of the training values by which targets are standardised.
    """

    def __init__(
        self,
        columns: Columns,
        features: Sequence[Feature],
        missing: Missing = "error",
        transform: Transform = None,
        rows: Indices | None = None,
        targets: Tensor | None = None,
        classes: list[str] | None = None,
        target_scale: Sequence[float] | None = None,
    ) -> None:
        self._path = columns.path
        self._lines = columns.lines
        self.dialect = columns.dialect
        self.features = [dict(feature) for feature in features]
        self.missing = missing
        self.rows = np.arange(len(columns)) if rows is None else rows
        inputs = np.concatenate([columns.encoded(f, missing) for f in features], axis=1)
        if targets is not None:
            targets = targets[torch.from_numpy(self.rows)]
        super().__init__(torch.from_numpy(inputs.astype(np.float32)[self.rows]), targets, transform)
        self.target_scale = None if target_scale is None else tuple(target_scale)
        self.classes = classes

    def path(self, index: int) -> str:
        """Return the file and the row of a sample."""
        return f"{self._path}:{self._lines[int(self.rows[index])]}"

    def input_form(self) -> dict[str, Any]:
        """Return the encoding of the columns, with the training statistics, as plain values."""
        return {
            "kind": "table",
            "features": self.features,
            "missing": self.missing,
            "dialect": asdict(self.dialect),
        }

    def statistics(self) -> dict[str, Any]:
        """Return the encoding that the training rows determine: what a checkpoint keeps."""
        scale = None if self.target_scale is None else list(self.target_scale)
        return {"features": self.features, "classes": self.classes, "target_scale": scale}


def table(
    path: str,
    split: Split,
    target: str,
    target_kind: Literal["number", "class"] = "number",
    features: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    channels: int | None = None,
    missing: Missing = "error",
    standardize_target: bool = True,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    statistics: Mapping[str, Any] | None = None,
    delimiter: str | None = None,
    decimal: str = ".",
    thousands: str | None = None,
    encoding: str | None = None,
) -> Table | None:
    """Open one split of a file, or of a folder with a train file and perhaps val and test.

    A split without a file of its own is cut from train, stratified by class; with `folds` val is
    a fold of the rows that are not test. None if a split has no rows. Raises DataError.

    statistics: the encoding of columns and targets that a checkpoint keeps; it takes the place of
    the training rows' if the columns are the same. channels: how many inputs are expected.
    delimiter, decimal, thousands, encoding: see `Dialect`.
    """
    place = Path(path).expanduser()
    dialect = Dialect(delimiter, decimal, thousands, encoding)
    train_file = split_file(place, "train", SUFFIXES)
    if train_file is None:
        raise DataError(f"data.path={path}: no such file, nor a folder with a train.csv")
    train = read_columns(train_file, dialect)
    test_file = split_file(place, "test", SUFFIXES)
    val_file = None if folds else split_file(place, "val", SUFFIXES)

    saved = statistics or {}
    saved_names = [feature["name"] for feature in saved.get("features", ())]
    names = _default_features(train, target, saved_names) if features is None else list(features)
    if not names:
        raise DataError(f"data.path={path}: no column but data.target={target} to predict from")
    if saved_names != names:
        saved = {}
    classes = None
    labels = np.zeros(len(train))
    if target_kind == "class":
        classes = _class_names(train, target, list(saved.get("classes") or ()))
        labels = _targets(train, target, classes, None).numpy()

    # Test is cut first: its rows are the same whichever fold is validated on.
    test_size = 0 if test_file else round(test_fraction * len(train))
    val_size = 0 if val_file else round(val_fraction * len(train))
    rest, test_rows = stratified_split(labels, test_size, split_seed)
    train_part, val_part = train_and_val(labels[rest], val_size, split_seed, fold, folds)
    if not len(train_part):
        raise DataError(f"{train.path}: {len(train)} rows are too few for three splits")
    train_rows = rest[train_part]

    fitted_features = saved.get("features") or [
        _fit_feature(train, train_rows, name, categorical) for name in names
    ]
    _check_width(train, fitted_features, channels)
    scale = None
    if standardize_target and classes is None:
        values = train.numbers(target, "error", "data.target")[train_rows]
        scale = saved.get("target_scale") or _mean_and_std(values)

    part = {"train": train_rows, "val": rest[val_part], "test": test_rows}[split]
    file = {"train": None, "val": val_file, "test": test_file}[split]
    columns = train
    rows: Indices | None = part
    if file is not None:
        columns = read_columns(file, dialect)
        rows = None  # all
    elif not len(part):
        return None
    targets = _targets(columns, target, classes, scale)
    return Table(columns, fitted_features, missing, transform, rows, targets, classes, scale)


def _default_features(train: Columns, target: str, saved_names: Sequence[str]) -> list[str]:
    """Return all columns but the target, and but row numbers that a program has written.

    saved_names: columns of a checkpoint, which stay.
    """
    names = [name for name in train.cells if name not in (target, target.strip())]
    first = next(iter(train.cells))
    for name in dict.fromkeys((first, _ARROW_INDEX)):
        if name in _ROW_NUMBERS and name in names and name not in saved_names:
            logger.info(
                "%s: column %r is left out: it holds row numbers; data.features can name it",
                train.path,
                name,
            )
            names.remove(name)
    return names


def _class_names(train: Columns, target: str, saved: list[str]) -> list[str]:
    """Return the classes of a checkpoint if they include those of the file, else the file's."""
    present = {cell for cell in train.column(target, "data.target") if cell is not None}
    return saved if present <= set(saved) else sort_names(present)


def _fit_feature(
    train: Columns, rows: Indices, name: str, categorical: Sequence[str] | None
) -> Feature:
    """Return how a column becomes inputs, with the statistics of the training rows.

    categorical: the columns with categories; None: those most of whose values are no numbers.
    """
    for other in categorical or ():
        train.column(other, "data.categorical")
    cells = train.column(name, "data.features")
    if categorical is None:
        has_categories = not train.holds_numbers(name)
    else:
        has_categories = name in categorical
    if has_categories:
        present = {cells[row] for row in rows} - {None}
        categories = sort_names({str(cell) for cell in present})
        return {"name": name, "categories": categories, "mean": 0.0, "std": 1.0}
    values = train.numbers(name, "mean", "data.features")[rows]
    values = values[~np.isnan(values)]
    if not len(values):
        raise DataError(f"{train.path}: column {name!r} has no value in the training rows")
    mean, std = _mean_and_std(values)
    return {"name": name, "categories": None, "mean": mean, "std": std}


def _mean_and_std(values: Numbers) -> tuple[float, float]:
    """Return mean and standard deviation; 1 for the latter if all values are equal."""
    return float(values.mean()), float(values.std()) or 1.0


def _check_width(train: Columns, features: Sequence[Feature], channels: int | None) -> None:
    widths = {feature["name"]: len(feature["categories"] or [None]) for feature in features}
    width = sum(widths.values())
    if channels not in (None, width):
        inputs = ", ".join(f"{name} {count}" for name, count in widths.items())[:500]
        raise DataError(
            f"data.channels={channels}, but the columns of {train.path} give {width} inputs "
            f"({inputs}): set data.channels={width}"
        )


def _targets(
    columns: Columns, target: str, classes: list[str] | None, scale: Sequence[float] | None
) -> Tensor:
    """Return the targets of all rows: class numbers, or values, which `scale` standardises."""
    if classes is None:
        mean, std = scale or (0.0, 1.0)
        values = (columns.numbers(target, "error", "data.target") - mean) / std
        return torch.from_numpy(values).float()
    numbers = {name: number for number, name in enumerate(classes)}
    targets = list[int]()
    for row, cell in enumerate(columns.column(target, "data.target")):
        if cell is None:
            raise DataError(f"{columns.place(row, target)}: no class")
        if cell not in numbers:
            raise DataError(f"{columns.place(row, target)}: class {cell!r}, which train lacks")
        targets.append(numbers[cell])
    return torch.tensor(targets)
