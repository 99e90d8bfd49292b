"""Tables from CSV and Parquet files: rows of features, and a number or a class to predict."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.errors import DataError
from data.formats.columns import (
    SUFFIXES,
    Columns,
    Feature,
    RowNumbers,
    encoded,
    fitted,
    in_order,
    numbers,
    read_columns,
)
from data.images import Transform
from data.sources import Split
from data.splits import cut, train_and_val

Missing = Literal["error", "mean"]
Kind = Literal["number", "class"]
_Cut = Callable[[npt.NDArray[Any], int, int], tuple[RowNumbers, RowNumbers]]


class TableRows:
    """Rows without a target, for predictions: samples are float32 [features]."""

    def __init__(
        self,
        columns: Columns,
        features: Sequence[Feature],
        missing: Missing = "error",
        transform: Transform | None = None,
        rows: RowNumbers | None = None,
    ) -> None:
        self._path, self._first_row = columns.path, columns.first_row
        self.described = [
            {**asdict(f), "categories": None if f.categories is None else list(f.categories)}
            for f in features
        ]
        self.missing = missing
        self.rows = np.arange(len(columns)) if rows is None else rows
        self.inputs = torch.from_numpy(encoded(columns, features, missing)[self.rows])
        self.transform = transform

    def __len__(self) -> int:
        return len(self.inputs)

    def path(self, index: int) -> str:
        """Return the file and the row of a sample."""
        return f"{self._path}:{self._first_row + int(self.rows[index])}"

    def input_form(self) -> dict[str, Any]:
        """Return the encoding of the columns, with the training statistics, as plain values."""
        return {"kind": "table", "features": self.described, "missing": self.missing}

    def __getitem__(self, index: int) -> Any:
        row = self.inputs[index]
        return row if self.transform is None else self.transform(row)


class Table(TableRows):
    """Rows with a target: samples are (float32 [features], a float32 value or a class number).

    target_scale: (mean, std) of the training values by which targets are standardised.
    """

    def __init__(
        self,
        columns: Columns,
        features: Sequence[Feature],
        targets: Tensor,
        classes: list[str] | None,
        target_scale: tuple[float, float] | None,
        missing: Missing,
        transform: Transform | None,
        rows: RowNumbers | None,
    ) -> None:
        super().__init__(columns, features, missing, transform, rows)
        self.answers = targets[torch.from_numpy(self.rows)]
        self.target_scale = target_scale and (float(target_scale[0]), float(target_scale[1]))
        if classes is not None:
            self.classes, self.targets = classes, self.answers

    def statistics(self) -> dict[str, Any]:
        """Return how the columns are encoded, by the training rows: what a checkpoint keeps."""
        scale = None if self.target_scale is None else list(self.target_scale)
        classes = getattr(self, "classes", None)
        return {"features": self.described, "classes": classes, "target_scale": scale}

    def fingerprint(self) -> str:
        """Return a digest of the encoded rows and their targets."""
        digest = hashlib.sha256(repr(self.described).encode())
        digest.update(self.inputs.numpy().tobytes() + self.answers.numpy().tobytes())
        return digest.hexdigest()[:16]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        target = self.answers[index]
        return super().__getitem__(index), target if target.is_floating_point() else int(target)


def table(
    path: str,
    split: Split,
    target: str,
    target_kind: Kind = "number",
    features: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    channels: int | None = None,
    missing: Missing = "error",
    standardize_target: bool = True,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    transform: Transform | None = None,
    fold: int | None = None,
    folds: int | None = None,
    statistics: Mapping[str, Any] | None = None,
) -> Table | None:
    """Open one split of a file, or of a folder with a train file and perhaps val and test.

    What has no file of its own is cut from train by its fraction, stratified by class; with `folds`
    val is fold number `fold` of what test leaves. Columns are encoded and targets standardised by
    the training rows. `channels`: how many inputs are expected. `statistics`: a checkpoint's
    (`Table.statistics`), in place of the training rows' if the columns are the same.
    """
    files = {name: _file_of(Path(path).expanduser(), name) for name in ("train", "val", "test")}
    if files["train"] is None:
        raise DataError(f"data.path={path}: no such file, nor a folder with a train.csv")
    train = read_columns(files["train"])
    names = [n for n in train.cells if n != target] if features is None else list(features)
    if not names:
        raise DataError(f"data.path={path}: no column but data.target={target} to predict from")
    if statistics is not None and [f["name"] for f in statistics["features"]] != names:
        statistics = None  # other columns were chosen since
    classes = None
    if target_kind == "class":
        found = {cell for cell in train.column(target, "data.target") if cell is not None}
        classes = list((statistics or {}).get("classes") or in_order(found))
    if folds is not None:
        files["val"] = None
    labels = np.zeros(len(train)) if classes is None else _targets(train, target, classes, None)
    of_val = partial(train_and_val, fold=fold, folds=folds)
    wanted = {"test": test_fraction, "val": val_fraction}
    parts = _parts(train, np.asarray(labels), wanted, files, split_seed, of_val)
    encoding = (
        fitted(train, parts["train"], names, categorical)
        if statistics is None
        else described_features(statistics["features"])
    )
    _check_width(train, encoding, channels)
    scale = None
    if standardize_target and classes is None:
        scale = (statistics or {}).get("target_scale") or _scale(train, target, parts["train"])
    own = files[split] if split != "train" else None
    if own is None and not len(parts[split]):
        return None
    columns = train if own is None else read_columns(own)
    targets = _targets(columns, target, classes, scale)
    rows = parts[split] if own is None else None
    return Table(columns, encoding, targets, classes, scale, missing, transform, rows)


def rows_to_predict(
    path: str, described: Sequence[dict[str, Any]], missing: Missing, transform: Transform | None
) -> TableRows:
    """Open a file for predictions, encoded as `TableRows.input_form` describes it."""
    return rows_as_described(read_columns(Path(path).expanduser()), described, missing, transform)


def rows_as_described(
    columns: Columns,
    described: Sequence[Mapping[str, Any]],
    missing: Missing,
    transform: Transform | None,
) -> TableRows:
    """Encode columns as `TableRows.input_form` describes it. Raises DataError."""
    return TableRows(columns, described_features(described), missing, transform)


def described_features(described: Sequence[Mapping[str, Any]]) -> list[Feature]:
    """Return the encoding that plain values describe."""
    return [
        Feature(d["name"], d["categories"] and tuple(d["categories"]), d["mean"], d["std"])
        for d in described
    ]


def _file_of(place: Path, split: str) -> Path | None:
    """Return the file of a split; a single file is train's."""
    if not place.is_dir():
        return place if split == "train" and place.is_file() else None
    found = (place / f"{split}{suffix}" for suffix in SUFFIXES)
    return next((path for path in found if path.is_file()), None)


def _parts(
    train: Columns,
    labels: npt.NDArray[Any],
    wanted: Mapping[str, float],
    files: Mapping[str, Path | None],
    seed: int,
    val: _Cut,
) -> dict[str, RowNumbers]:
    """Return the rows of the train file that each split takes, by the fractions of test and val."""
    rest: RowNumbers = np.arange(len(train))
    parts: dict[str, RowNumbers] = {}
    for split, fraction in wanted.items():
        count = 0 if files[split] else round(fraction * len(train))
        kept, taken = (val if split == "val" else cut)(labels[rest], count, seed)
        rest, parts[split] = rest[kept], rest[taken]
    if not len(rest):
        raise DataError(f"{train.path}: {len(train)} rows are too few for three splits")
    return {**parts, "train": rest}


def _targets(
    columns: Columns,
    target: str,
    classes: list[str] | None,
    scale: tuple[float, float] | None,
) -> Tensor:
    if classes is None:
        values = numbers(columns, target, "error", "data.target")
        mean, std = scale or (0.0, 1.0)
        return torch.from_numpy((values - mean) / std).float()
    found = {name: number for number, name in enumerate(classes)}
    cells = columns.column(target, "data.target")
    for row, cell in enumerate(cells):
        if cell not in found:
            what = "no class" if cell is None else f"class {cell!r}, which train lacks"
            raise DataError(f"{columns.place(row, target)}: {what}")
    return torch.tensor([found[str(cell)] for cell in cells])


def _scale(train: Columns, target: str, rows: RowNumbers) -> tuple[float, float]:
    values = numbers(train, target, "error", "data.target")[rows]
    return float(values.mean()), float(values.std()) or 1.0


def _check_width(train: Columns, features: Sequence[Feature], channels: int | None) -> None:
    width = sum(feature.width for feature in features)
    if channels is not None and channels != width:
        shown = ", ".join(f"{f.name} {f.width}" for f in features[:12])
        raise DataError(
            f"data.channels={channels}, but the columns of {train.path} give {width} inputs "
            f"({shown}{', ...' if len(features) > 12 else ''}): set data.channels={width}"
        )
