"""Tables from CSV and Parquet files: rows of features, and a number or a class to predict."""

import bz2
import csv
import gzip
import logging
import lzma
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.errors import DataError, check_regular, explained, import_package
from regimen.data.keys import Indices
from regimen.data.sources import TensorSamples
from regimen.data.splits import Split, cut, file_of, in_order, train_and_val
from regimen.data.transforms import Transform

logger = logging.getLogger(__name__)
_OPENERS: Mapping[str, Callable[..., IO[str]]] = {
    "": open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_TEXTS = tuple(kind + packed for kind in (".csv", ".tsv") for packed in _OPENERS)
_SUFFIXES = (*_TEXTS, ".parquet")
# Of a value that is missing: what pandas takes for one, and a question mark.
_MISSING = frozenset(
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"}
    | {"<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "?"}
)
# These may be names of categories; in a column of numbers they stand for a missing one.
_NO_NUMBER = frozenset({"-", "--", ".", "*", "na", "n.a.", "N.A.", "none", "missing"})
_DELIMITERS = (",", ";", "\t", "|")
# A number that is written in another way than the file's: `1,000.5`, `12%`, `3,5`, `1 000`.
_ODD_NUMBER = re.compile(r"[+-]?[$€£]?\s?\d[\d.,' \u00a0\u202f]*(e[+-]?\d+)?\s?[%$€£]?", re.I)
_AS_CATEGORIES = {"data.target": "data.target_kind=class"}
# How a program calls the row numbers that it wrote as a column.
_ARROW_INDEX = "__index_level_0__"
_ROW_NUMBERS = ("", "Unnamed: 0", _ARROW_INDEX)

Missing = Literal["error", "mean"]
Numbers = NDArray[np.float64]
Cells = list[str | None]
# How a column becomes inputs, as plain values, which checkpoints and `inference.json` keep: its
# `name`; `categories`, one input for each; or None, and the `mean` and `std` of numbers.
Feature = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a text file is written: what separates cells, how numbers are spelled, its encoding.

    delimiter: None = what the header is split by. thousands: what groups the digits of a number.
    encoding: None = UTF-8, or UTF-16 where the file begins with its mark.
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

    def number(self, cell: str) -> float:
        """Return the number that a cell holds. Raises ValueError."""
        text = cell
        if self.thousands is not None and self.thousands in text:
            group, point = re.escape(self.thousands), re.escape(self.decimal)
            if not re.fullmatch(rf"[+-]?\d{{1,3}}({group}\d{{3}})+({point}\d*)?", text):
                raise ValueError(text)
            text = text.replace(self.thousands, "")
        foreign = {"_", "."} - {self.decimal}  # Python reads 1_000, and no other program does
        if any(sign in text for sign in foreign):
            raise ValueError(text)
        return float(text.replace(self.decimal, "."))

    def holds_number(self, cell: str) -> bool:
        """Return whether a cell is a number."""
        try:
            self.number(cell)
        except ValueError:
            return False
        return True


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
        if (found := self.cells.get(name, self.cells.get(name.strip()))) is None:
            known = ", ".join(map(repr, self.cells))
            raise DataError(f"{key}: {self.path} has no column {name!r}; it has {known}")
        return found

    def holds_numbers(self, name: str) -> bool:
        """Return whether at least half of a column's values are numbers.

        Raises DataError where they are numbers in another spelling than the file's.
        """
        cells = self.column(name, "data.features")
        numbers = 0
        others = 0
        odd_ones = list[str]()  # written like numbers
        for cell in cells:
            if cell is None or cell in _NO_NUMBER:
                continue
            if self.dialect.holds_number(cell):
                numbers += 1
            elif _ODD_NUMBER.fullmatch(cell):
                odd_ones.append(cell)
            else:
                others += 1
        if numbers >= others + len(odd_ones):
            return numbers > 0
        if numbers + len(odd_ones) < others or not odd_ones:
            return False
        odd = odd_ones[0]
        raise DataError(
            f"{self.place(cells.index(odd), name)}: {odd!r} is written like a number, as most of "
            "the column is, and cannot be read as one: \"data.decimal=','\" or "
            "\"data.thousands=','\" says how numbers are written; if they are categories: "
            f"data.categorical=[{name}]"
        )

    def numbers(self, name: str, missing: Missing, key: str) -> Numbers:
        """Return a column as numbers, NaN where a value is missing. Raises DataError."""
        found = np.full(len(self), math.nan)
        for row, cell in enumerate(self.column(name, key)):
            if cell is None or cell in _NO_NUMBER:
                if missing == "error":
                    why = "no value; data.missing=mean fills it in"
                    raise DataError(f"{self.place(row, name)}: {why}")
                continue
            with suppress(ValueError):
                found[row] = self.dialect.number(cell)
            if not math.isfinite(found[row]):
                raise DataError(
                    f"{self.place(row, name)}: {cell!r} is not a finite number: mend the cell; "
                    "data.decimal and data.thousands say how numbers are written, and "
                    f"{_AS_CATEGORIES.get(key, 'data.categorical')} that a column holds categories"
                )
        return found

    def encoded(self, feature: Feature, missing: Missing) -> Numbers:
        """Return the inputs [rows, 1 or categories] of a column. Raises DataError.

        A missing number is the training mean with `missing="mean"`, a missing or unknown category
        is none of those known.
        """
        name, categories = feature["name"], feature["categories"]
        if categories is None:
            values = self.numbers(name, missing, "data.features")
            scaled = (values - float(feature["mean"])) / float(feature["std"])
            return np.nan_to_num(scaled)[:, None]
        cells = self.column(name, "data.features")
        if missing == "error" and None in cells:
            why = "no value; data.missing=mean takes it as none of the categories"
            raise DataError(f"{self.place(cells.index(None), name)}: {why}")
        column, known = (np.array(values, dtype=object) for values in (cells, categories))
        equal: NDArray[np.bool_] = np.equal(column[:, None], known)
        return equal.astype(np.float64)


def read_columns(path: str | Path, dialect: Dialect | None = None) -> Columns:
    """Read a whole file. Raises DataError."""
    path = Path(path).expanduser()
    name = path.name.lower()
    if not name.endswith(_SUFFIXES):
        raise DataError(f"data.path: {path} is none of {', '.join(_SUFFIXES)}")
    check_regular(path)
    # Arrow's errors, and those of compressed files, are such.
    kinds = (OSError, ValueError, NotImplementedError, EOFError, csv.Error)
    kind = "parquet" if name.endswith(".parquet") else name.rpartition(".csv")[1][1:] or "tsv"
    with explained(f"{path}: cannot be read as {kind}", *kinds, zlib.error, lzma.LZMAError):
        if kind == "parquet":
            dialect = Dialect()
            names, columns, lines = _parquet(path)
        else:
            dialect = dialect or Dialect()
            names, columns, lines = _csv(path, "\t" if kind == "tsv" else ",", dialect)
    cells = dict[str, Cells]()
    for place, (name, column) in enumerate(zip(names, columns, strict=True)):
        if not name and not any(column):
            continue  # what a separator at the end of each line makes
        # A first column without a name holds the numbers of the rows.
        if name in cells or not (name or place == 0):
            why = "each column needs a name of its own, in the first row"
            raise DataError(f"{path}: {why}: {names}")
        cells[name] = column
    if not names:
        raise DataError(f"{path}: each column needs a name of its own, in the first row")
    if not lines:
        raise DataError(f"{path}: the table has no rows")
    return Columns(path, cells, lines, dialect)


def _csv(path: Path, usual: str, dialect: Dialect) -> tuple[list[str], list[Cells], list[int]]:
    rows = list[list[str]]()
    lines = list[int]()
    opener = _OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rt", newline="", encoding=_encoding(path, opener, dialect)) as file:
            text = file.readlines()
    except UnicodeError as error:
        raise DataError(
            f"{path}: its text is not {dialect.encoding or 'UTF-8'} ({error}): data.encoding says "
            "what it is, such as data.encoding=cp1252 or latin-1"
        ) from error
    except LookupError as error:
        raise DataError(f"data.encoding={dialect.encoding}: Python has no such encoding") from error
    header = next((line for line in text if line.strip()), "")
    delimiter = dialect.delimiter or _delimiter(path, header, usual)
    for number, row in enumerate(csv.reader(text, delimiter=delimiter, strict=True), 1):
        cells = [cell.strip() for cell in row]
        if cells not in ([], [""]):  # an empty line is no row
            rows.append(cells)
            lines.append(number)
    while rows and not any(rows[-1]):  # as spreadsheets leave them
        rows.pop()
        lines.pop()
    names = rows[0] if rows else []
    for number, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            raise ValueError(
                f"row {number} has {len(row)} cells, the header {len(names)} (separated by "
                f"{delimiter!r}: data.delimiter says by what they are)"
            )
    columns: list[Cells] = list(map(_without_marks, zip(*rows[1:], strict=True)))
    columns = columns or [[] for _ in names]
    return names, columns, lines[1:]


def _without_marks(column: Sequence[str]) -> Cells:
    return [None if cell in _MISSING else cell for cell in column]


def _encoding(path: Path, opener: Callable[..., IO[Any]], dialect: Dialect) -> str:
    """Return the encoding of a file: as given, or by its first bytes."""
    if dialect.encoding is not None:
        return dialect.encoding
    with opener(path, "rb") as file:
        start = file.read(2)
    return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _delimiter(path: Path, header: str, usual: str) -> str:
    """Return what separates the names of a header. Raises DataError if that is not clear."""
    splitting = []
    for one in _DELIMITERS:
        if len(next(csv.reader([header], delimiter=one), [])) > 1:
            splitting.append(one)
    if usual in splitting or not splitting:
        return usual
    if len(splitting) > 1:
        raise DataError(
            f"{path}: each of {splitting} separates names in its first row: data.delimiter says "
            "which it is"
        )
    logger.info("%s: its cells are separated by %r", path, splitting[0])
    return splitting[0]


def _parquet(path: Path) -> tuple[list[str], list[Cells], Sequence[int]]:
    table = import_package("pyarrow.parquet", "parquet").read_table(path)
    columns = [[*map(_text, c.to_pylist())] for c in table.columns]
    return table.column_names, columns, range(1, len(table) + 1)


def _text(value: Any) -> str | None:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if missing else str(int(value) if isinstance(value, bool) else value)


class Table(TensorSamples):
    """Rows of a table: samples are float32 [features], or with targets (those, target).

    A target is a float32 value, or a class number where there are `classes`. `target_scale`: (mean,
    std) of the training values by which targets are standardised.
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
        targets = None if targets is None else targets[torch.from_numpy(self.rows)]
        super().__init__(torch.from_numpy(inputs.astype(np.float32)[self.rows]), targets, transform)
        self.target_scale = target_scale and tuple(target_scale)
        self.classes = classes

    def path(self, index: int) -> str:
        """Return the file and the row of a sample."""
        return f"{self._path}:{self._lines[int(self.rows[index])]}"

    def input_form(self) -> dict[str, Any]:
        """Return the encoding of the columns, with the training statistics, as plain values."""
        read = {"features": self.features, "missing": self.missing}
        return {"kind": "table", **read, "dialect": asdict(self.dialect)}

    def statistics(self) -> dict[str, Any]:
        """Return how the columns are encoded, by the training rows: what a checkpoint keeps."""
        scale = self.target_scale and list(self.target_scale)
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

    What has no file of its own is cut from train, stratified by class; with `folds` val is a fold
    of what test leaves. Columns and targets are encoded by the training rows, or by a checkpoint's
    `statistics` if the columns are the same. `channels`: how many inputs are expected. The last
    four are a `Dialect`.
    """
    place = Path(path).expanduser()
    dialect = Dialect(delimiter, decimal, thousands, encoding)
    if (file := file_of(place, "train", _SUFFIXES)) is None:
        raise DataError(f"data.path={path}: no such file, nor a folder with a train.csv")
    train = read_columns(file, dialect)
    test_file = file_of(place, "test", _SUFFIXES)
    val_file = None if folds else file_of(place, "val", _SUFFIXES)
    known = statistics or {}
    before = [feature["name"] for feature in known.get("features", ())]
    names = _features(train, target, before) if features is None else list(features)
    if not names:
        raise DataError(f"data.path={path}: no column but data.target={target} to predict from")
    if before != names:
        known = {}  # none, or other columns were chosen since
    classes, scale, labels = None, None, np.zeros(len(train))
    if target_kind == "class":
        found = {cell for cell in train.column(target, "data.target") if cell is not None}
        classes = list(known.get("classes") or ())
        if not found <= {*classes}:  # where there are names of a run, they are compared with these
            classes = in_order(found)
        labels = _targets(train, target, classes, None).numpy()
    # Test is cut first: its rows are the same whichever fold is validated on.
    rest, test = cut(labels, 0 if test_file else round(test_fraction * len(train)), split_seed)
    val_size = 0 if val_file else round(val_fraction * len(train))
    kept, val = train_and_val(labels[rest], val_size, split_seed, fold, folds)
    if not len(kept):
        raise DataError(f"{train.path}: {len(train)} rows are too few for three splits")
    rows = rest[kept]
    fitted = known.get("features") or [_fitted(train, rows, n, categorical) for n in names]
    _check_width(train, fitted, channels)
    if standardize_target and classes is None:
        values = train.numbers(target, "error", "data.target")[rows]
        scale = known.get("target_scale") or (float(values.mean()), float(values.std()) or 1.0)
    rows = {"train": rows, "val": rest[val], "test": test}[split]
    own = {"train": None, "val": val_file, "test": test_file}[split]
    columns = train if own is None else read_columns(own, dialect)
    rows = rows if own is None else np.arange(len(columns))
    if not len(rows):
        return None
    targets = _targets(columns, target, classes, scale)
    return Table(columns, fitted, missing, transform, rows, targets, classes, scale)


def _features(train: Columns, target: str, known: Sequence[str]) -> list[str]:
    """Return all columns but the target, and but row numbers that a program has written.

    known: columns of a checkpoint, which stay.
    """
    names = [name for name in train.cells if name not in (target, target.strip())]
    first = next(iter(train.cells))
    for name in dict.fromkeys((first, _ARROW_INDEX)):
        if name in _ROW_NUMBERS and name in names and name not in known:
            text = "%s: column %r is left out: it holds row numbers; data.features can name it"
            logger.info(text, train.path, name)
            names.remove(name)
    return names


def _fitted(train: Columns, rows: Indices, name: str, categorical: Sequence[str] | None) -> Feature:
    """Return how a column becomes inputs, with the statistics of the training rows.

    categorical: the columns with categories; None: those most of whose values are no numbers.
    """
    for other in categorical or ():
        train.column(other, "data.categorical")
    cells = train.column(name, "data.features")
    if categorical is None and not train.holds_numbers(name):
        categorical = [name]
    if name in (categorical or ()):
        categories = in_order({cell for row in rows if (cell := cells[row]) is not None})
        return {"name": name, "categories": categories, "mean": 0.0, "std": 1.0}
    values = train.numbers(name, "mean", "data.features")[rows]
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(f"{train.path}: column {name!r} has no value in the training rows")
    mean, std = float(known.mean()), float(known.std()) or 1.0
    return {"name": name, "categories": None, "mean": mean, "std": std}


def _check_width(train: Columns, features: Sequence[Feature], channels: int | None) -> None:
    widths = {feature["name"]: len(feature["categories"] or "x") for feature in features}
    width = sum(widths.values())
    if channels not in (None, width):
        shown = ", ".join(f"{name} {inputs}" for name, inputs in widths.items())[:500]
        what = f"the columns of {train.path} give {width} inputs ({shown})"
        raise DataError(f"data.channels={channels}, but {what}: set data.channels={width}")


def _targets(
    columns: Columns, target: str, classes: list[str] | None, scale: Sequence[float] | None
) -> Tensor:
    if classes is None:
        mean, std = scale or (0.0, 1.0)
        values = (columns.numbers(target, "error", "data.target") - mean) / std
        return torch.from_numpy(values).float()
    numbers = {name: number for number, name in enumerate(classes)}
    cells = columns.column(target, "data.target")
    for row, cell in enumerate(cells):
        if cell not in numbers:
            what = "no class" if cell is None else f"class {cell!r}, which train lacks"
            raise DataError(f"{columns.place(row, target)}: {what}")
    return torch.tensor([numbers[str(cell)] for cell in cells])
