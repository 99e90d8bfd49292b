"""Data sets of the Hugging Face package `datasets`: saved on disk, from files, or by name."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from data.decode import decode_image
from data.errors import DataError, MissingPackageError, reason, shortened
from data.formats.columns import class_names
from data.images import Transform
from data.sources import Split
from data.splits import rows_of_train

_NAMES = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}


class ArrowRows:
    """Rows of an Arrow table: samples are (input, target), or the input alone without a target.

    Images become uint8 tensors [C, H, W], numbers and lists of numbers tensors; texts stay texts,
    or become what `tokenizer` makes of them: a dict of int64 tensors [length].
    """

    def __init__(
        self,
        table: Any,
        columns: Mapping[str, str],
        classes: list[str] | None = None,
        channels: int = 3,
        tokenizer: Any = None,
        length: int = 128,
        transform: Transform | None = None,
    ) -> None:
        self._table, self._columns = table, columns
        target = table.features.get(columns.get("target"))
        self._numbered = type(target).__name__ == "ClassLabel"
        self._picture = type(table.features[columns["input"]]).__name__ == "Image"
        self._numbers = {name: number for number, name in enumerate(classes or ())}
        self._tokenizer, self._length = tokenizer, length
        if classes is not None:
            self.classes = classes
            self.targets = torch.tensor([self._class(value) for value in table[columns["target"]]])
        self.channels = channels
        self.transform = transform

    def __len__(self) -> int:
        return len(self._table)

    def fingerprint(self) -> str:
        """Return the fingerprint that `datasets` keeps of a table and its transformations."""
        return f"{self._table._fingerprint}-{len(self)}"

    def input_form(self) -> dict[str, Any]:
        """Return the form of pictures before the transforms; that of other inputs is unknown."""
        picture = {"kind": "picture", "channels": self.channels, "size": None}
        return picture if self._picture else {"kind": "array"}

    def __getitem__(self, index: int) -> Any:
        return self.sample(self._table[index], index)

    def sample(self, row: Mapping[str, Any], index: int) -> Any:
        """Return the sample of a row; `index` is for messages."""
        value = self._input(row[self._columns["input"]], index)
        value = value if self.transform is None else self.transform(value)
        if "target" not in self._columns:
            return value
        target = row[self._columns["target"]]
        classes = bool(self._numbers)
        return value, self._class(target) if classes else _tensor(target, self._columns, index)

    def _input(self, value: Any, index: int) -> Any:
        if value is None:
            raise DataError(f"row {index}, column {self._columns['input']!r}: no value")
        if self._picture:
            content = value["bytes"] or Path(value["path"]).read_bytes()
            return decode_image(content, f"row {index} ({value['path']})", self.channels)
        if isinstance(value, str):
            return value if self._tokenizer is None else self._tokens(value)
        return _tensor(value, self._columns, index)

    def _tokens(self, text: str) -> dict[str, torch.Tensor]:
        found = self._tokenizer(
            text, truncation=True, padding="max_length", max_length=self._length
        )
        return {name: torch.tensor(values) for name, values in found.items()}

    def _class(self, value: Any) -> int:
        if self._numbered:
            return int(value)
        if str(value) not in self._numbers:
            column = self._columns["target"]
            raise DataError(f"column {column!r}: class {value!r} is not among those of train")
        return self._numbers[str(value)]


def huggingface(
    path: str,
    split: Split,
    columns: Mapping[str, str],
    name: str | None = None,
    classification: bool = True,
    tokenizer: str | None = None,
    length: int = 128,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    channels: int = 3,
    transform: Transform | None = None,
    fold: int | None = None,
    folds: int | None = None,
    num_classes: int | None = None,
) -> ArrowRows | None:
    """Open one split of a folder of `save_to_disk`, of files, or of a name on the hub.

    columns: `input` and, for training, `target`. name: a configuration of the data set. A missing
    val split is cut from train, stratified by class. With `folds` val is fold number `fold` of
    train. None if there is no such split; raises DataError.
    """
    splits = tables(path, name)
    train = split_of(splits, "train")
    if train is None:
        raise DataError(f"data.path={path} has no split train, only {', '.join(splits)}")
    check_columns(path, train, columns)
    classes = None
    if classification and "target" in columns:
        classes = getattr(train.features[columns["target"]], "names", None)
        if classes is None:
            found = {str(value) for value in train[columns["target"]]}
            classes = class_names(found, num_classes, len(train), f"data.path={path}")
    table = split_of(splits, split)
    cuts = folds is not None or (split_of(splits, "val") is None and val_fraction > 0)
    if cuts and split != "test":
        labels = np.zeros(len(train), np.int64)
        if classes is not None:
            labels = np.unique(train[columns["target"]], return_inverse=True)[1]
        rows = rows_of_train(split, labels, val_fraction, split_seed, fold, folds)
        table = train.select(rows)
    if table is None:
        return None
    words = None if tokenizer is None else import_tokenizer(tokenizer)
    return ArrowRows(
        undecoded(table, columns), columns, classes, channels, words, length, transform
    )


def tables(path: str, name: str | None, streaming: bool = False) -> dict[str, Any]:
    """Return the splits of a data set by their own names. Raises DataError."""
    datasets = import_package("datasets", "huggingface")
    folder = Path(path).expanduser()
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        found = (
            datasets.load_from_disk(str(folder))
            if saved
            else datasets.load_dataset(
                str(folder) if folder.exists() else path, name, streaming=streaming
            )
        )
    except Exception as error:  # of the hub, of file systems, of each format
        raise DataError(f"data.path={path}: {shortened(reason(error))}") from error
    return dict(found) if hasattr(found, "keys") else {"train": found}


def import_package(package: str, extra: str) -> ModuleType:
    """Import a package of an extra. Raises MissingPackageError with what installs it."""
    try:
        return __import__(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the package {package} is not installed: pip install 'regimen[{extra}]'"
        ) from error


def split_of(tables: Mapping[str, Any], split: str) -> Any:
    """Return the table of a split, whatever its name; None if there is none."""
    return next((tables[name] for name in _NAMES[split] if name in tables), None)


def check_columns(path: str, table: Any, columns: Mapping[str, str]) -> None:
    """Raise DataError for columns that a table lacks."""
    for key in columns.keys() - {"input", "target"}:
        raise DataError(f"data.columns.{key}: unknown; there are input and target")
    for key, column in columns.items():
        if column not in table.column_names:
            known = ", ".join(map(repr, table.column_names))
            raise DataError(f"data.columns.{key}: {path} has no column {column!r}; it has {known}")


def undecoded(table: Any, columns: Mapping[str, str]) -> Any:
    """Return a table whose images are the bytes of their files, for `data.decode`."""
    if type(table.features[columns["input"]]).__name__ != "Image":
        return table
    images = import_package("datasets", "huggingface").Image(decode=False)
    return table.cast_column(columns["input"], images)


def import_tokenizer(name: str) -> Any:
    """Return a tokenizer of transformers: a folder's or the hub's. Raises DataError."""
    transformers = import_package("transformers", "transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={name}: {shortened(error)}") from error


def _tensor(value: Any, columns: Mapping[str, str], index: int) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        shown = ", ".join(columns.values())
        raise DataError(f"row {index} ({shown}): {shortened(error)}") from error
    return numbers.float() if numbers.is_floating_point() else numbers
