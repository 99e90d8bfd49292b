"""Tables from CSV and Parquet files: rows of features, and a number or a class to predict."""

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.errors import DataError, explained, import_package
from data.keys import Indices
from data.sources import TensorSamples
from data.splits import Split, cut, file_of, in_order, train_and_val
from data.transforms import Transform

_SUFFIXES = (".csv", ".tsv", ".parquet")
_MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "None", "?"})

Missing = Literal["error", "mean"]
Numbers = NDArray[np.float64]
Cells = list[str | None]
# How a column becomes inputs, as plain values, which checkpoints and `inference.json` keep: its
# `name`; `categories`, one input for each; or None, and the `mean` and `std` of numbers.
Feature = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """The cells of a file as text, by column; None where one is missing."""

    path: Path
    cells: dict[str, Cells]
    first_row: int  # number of the first row, as a spreadsheet shows it

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()), []))

    def place(self, row: int, name: str) -> str:
        """Return where a cell is, for a message."""
        return f"{self.path}: row {self.first_row + row}, column {name!r}"

    def column(self, name: str, key: str) -> Cells:
        """Return the column that a key of the configuration names. Raises DataError."""
        if name not in self.cells:
            known = ", ".join(map(repr, self.cells))
            raise DataError(f"{key}: {self.path} has no column {name!r}; it has {known}")
        return self.cells[name]

    def numbers(self, name: str, missing: Missing, key: str) -> Numbers:
        """Return a column as numbers, NaN where a value is missing. Raises DataError."""
        found = np.full(len(self), math.nan)
        for row, cell in enumerate(self.column(name, key)):
            with suppress(ValueError):
                found[row] = math.nan if cell is None else float(cell)
            if math.isfinite(found[row]) or (cell is None and missing == "mean"):
                continue
            why = f"{cell!r} is not a finite number; are they categories (data.categorical)?"
            why = why if cell is not None else "no value; data.missing=mean fills it in"
            raise DataError(f"{self.place(row, name)}: {why}")
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


def read_columns(path: str | Path) -> Columns:
    """Read a whole file. Raises DataError."""
    path = Path(path).expanduser()
    if path.suffix not in _SUFFIXES:
        raise DataError(f"data.path: {path} is none of {', '.join(_SUFFIXES)}")
    kinds = (OSError, ValueError, NotImplementedError, csv.Error)  # Arrow's are such
    with explained(f"{path}: cannot be read as {path.suffix[1:]}", *kinds):
        names, columns, first = (_parquet if path.suffix == ".parquet" else _csv)(path)
    if not names or len({*names, ""}) <= len(names):
        raise DataError(f"{path}: each column needs a name of its own, in the first row: {names}")
    if not columns or not columns[0]:
        raise DataError(f"{path}: the table has no rows")
    return Columns(path, dict(zip(names, columns, strict=True)), first)


def _csv(path: Path) -> tuple[list[str], list[Cells], int]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with open(path, newline="", encoding="utf-8-sig") as file:
        names, *rows = [*csv.reader(file, delimiter=delimiter, strict=True)] or [[]]
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} cells, the header {len(names)}")
    columns = (map(str.strip, column) for column in zip(*rows, strict=True))
    return names, [[None if cell in _MISSING else cell for cell in c] for c in columns], 2


def _parquet(path: Path) -> tuple[list[str], list[Cells], int]:
    table = import_package("pyarrow.parquet", "parquet").read_table(path)
    return table.column_names, [[*map(_text, c.to_pylist())] for c in table.columns], 1


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
        self._path, self._first_row = columns.path, columns.first_row
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
        return f"{self._path}:{self._first_row + int(self.rows[index])}"

    def input_form(self) -> dict[str, Any]:
        """Return the encoding of the columns, with the training statistics, as plain values."""
        return {"kind": "table", "features": self.features, "missing": self.missing}

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
) -> Table | None:
    """Open one split of a file, or of a folder with a train file and perhaps val and test.

    What has no file of its own is cut from train, stratified by class; with `folds` val is a fold
    of what test leaves. Columns and targets are encoded by the training rows, or by a checkpoint's
    `statistics` if the columns are the same. `channels`: how many inputs are expected.
    """
    place = Path(path).expanduser()
    if (file := file_of(place, "train", _SUFFIXES)) is None:
        raise DataError(f"data.path={path}: no such file, nor a folder with a train.csv")
    train = read_columns(file)
    test_file = file_of(place, "test", _SUFFIXES)
    val_file = None if folds else file_of(place, "val", _SUFFIXES)
    names = [n for n in train.cells if n != target] if features is None else list(features)
    if not names:
        raise DataError(f"data.path={path}: no column but data.target={target} to predict from")
    known = statistics or {}
    if [feature["name"] for feature in known.get("features", ())] != names:
        known = {}  # none, or other columns were chosen since
    classes, scale, labels = None, None, np.zeros(len(train))
    if target_kind == "class":
        found = {cell for cell in train.column(target, "data.target") if cell is not None}
        classes = list(known.get("classes") or in_order(found))
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
    columns = train if own is None else read_columns(own)
    rows = rows if own is None else np.arange(len(columns))
    if not len(rows):
        return None
    targets = _targets(columns, target, classes, scale)
    return Table(columns, fitted, missing, transform, rows, targets, classes, scale)


def _fitted(train: Columns, rows: Indices, name: str, categorical: Sequence[str] | None) -> Feature:
    """Return how a column becomes inputs, with the statistics of the training rows.

    categorical: the columns with categories; None: those whose first value is not a number.
    """
    for other in categorical or ():
        train.column(other, "data.categorical")
    cells = train.column(name, "data.features")
    if categorical is None:
        try:
            float(next((cell for cell in cells if cell is not None), ""))
        except ValueError:
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
