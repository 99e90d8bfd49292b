"""Data sets of the Hugging Face package `datasets`: saved, from files, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regimen.conf.addresses import check_protocol, is_address
from regimen.conf.errors import problems_at
from regimen.data.decode import Channels, Range, decode_image, read_content
from regimen.data.errors import DataError, check_regular, explained, import_package
from regimen.data.splits import Split, class_names, is_cut, rows_of_train
from regimen.data.transforms import Transform, on_inputs

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
        classes: list[str] | None,
        channels: Channels,
        tokenizer: str | None,
        length: int,
        transform: Transform = None,
        value_range: Range = None,
    ) -> None:
        features = table.features
        self._numbered = type(features.get(columns.get("target"))).__name__ == "ClassLabel"
        self._picture = type(features[columns["input"]]).__name__ == "Image"
        if self._picture:  # as the bytes of their files, which are decoded here
            undecoded = import_package("datasets", "huggingface").Image(decode=False)
            table = table.cast_column(columns["input"], undecoded)
        self.table, self._columns = table, columns
        self._numbers = {name: number for number, name in enumerate(classes or ())}
        self._order: list[int] | None = None
        self._tokenizer, self._length = None, length
        if tokenizer is not None:
            auto = import_package("transformers", "transformers").AutoTokenizer
            with explained(f"data.tokenizer={tokenizer}", OSError, ValueError):
                self._tokenizer = auto.from_pretrained(tokenizer, trust_remote_code=False)
        if classes is not None:
            self.classes = classes
            self.targets = torch.tensor([self._class(value) for value in table[columns["target"]]])
        self.channels = channels
        self.value_range = value_range
        self.transform = transform

    def __len__(self) -> int:
        return len(self.table)

    def fingerprint(self) -> str:
        """Return the fingerprint that `datasets` keeps of a table and its transformations."""
        return f"{self.table._fingerprint}-{len(self)}"

    def input_form(self) -> dict[str, Any]:
        """Return the form of pictures before the transforms; that of other inputs is unknown."""
        picture: dict[str, Any] = {"kind": "picture", "channels": self.channels, "size": None}
        if self.value_range is not None:
            picture["range"] = list(self.value_range)
        return picture if self._picture else {"kind": "array"}

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.table[index])

    def sample(self, row: Mapping[str, Any]) -> Any:
        """Return the sample of a row."""
        value = row[self._columns["input"]]
        if value is None:
            raise DataError(f"column {self._columns['input']!r}: no value")
        if self._picture:
            content = value["bytes"] or read_content(value["path"])
            name = value["path"] or "its picture"
            value = decode_image(content, name, self.channels, self.value_range)
        elif not isinstance(value, str):
            value = _tensor(value)
        elif self._tokenizer is not None:
            padded = {"padding": "max_length", "max_length": self._length}
            found = self._tokenizer(value, truncation=True, **padded)
            value = {name: torch.tensor(values) for name, values in found.items()}
        if "target" not in self._columns:
            return on_inputs(self.transform, value)
        target = row[self._columns["target"]]
        target = self._class(target) if self._numbers else _tensor(target)
        return on_inputs(self.transform, (value, target))

    def renumber(self, numbers: list[int]) -> None:
        """Give each class, by its number so far, another number."""
        self._order = numbers

    def _class(self, value: Any) -> int:
        number = self._own_class(value)
        return number if self._order is None or number < 0 else self._order[number]

    def _own_class(self, value: Any) -> int:
        if self._numbered:
            return int(value)
        if str(value) not in self._numbers:
            column = self._columns["target"]
            raise DataError(f"column {column!r}: class {value!r} is not among those of train")
        return self._numbers[str(value)]


def _tensor(value: Any) -> torch.Tensor:
    numbers = torch.as_tensor(np.asarray(value))
    return numbers.float() if numbers.is_floating_point() else numbers


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
    channels: Channels = 3,
    transform: Transform = None,
    fold: int = 0,
    folds: int = 0,
    num_classes: int | None = None,
    value_range: Range = None,
) -> ArrowRows | None:
    """Open one split of a folder of `save_to_disk`, of files, or of a name on the hub.

    columns: `input` and, for training, `target`. name: a configuration of the data set. A missing
    val split is cut from train, stratified by class. With `folds` val is fold number `fold` of
    train. None if there is no such split; raises DataError.
    """
    tables = open_tables(path, name)
    train = tables.get("train")
    if train is None:
        raise DataError(f"data.path={path} has no split train, only {', '.join(tables)}")
    check_columns(path, train, columns)
    classes = None
    if classification and "target" in columns:
        classes = getattr(train.features[columns["target"]], "names", None)
        if classes is None:
            found = {str(value) for value in train[columns["target"]]}
            classes = class_names(found, num_classes, len(train), f"data.path={path}")
    table = split_of(tables, split)
    if is_cut(split, split_of(tables, "val") is not None, val_fraction, folds):
        labels = np.zeros(len(train)) if classes is None else train[columns["target"]]
        table = train.select(rows_of_train(split, labels, val_fraction, split_seed, fold, folds))
    if table is None:
        return None
    own = (tokenizer, length, transform, value_range)
    return ArrowRows(table, columns, classes, channels, *own)


def open_tables(path: str, name: str | None, streaming: bool = False) -> dict[str, Any]:
    """Return the splits of a data set by their own names. Raises DataError."""
    datasets = import_package("datasets", "huggingface")
    folder = Path(path).expanduser()
    given = str(folder) if folder.exists() else path
    if is_address(path):
        with problems_at("data.path"):
            check_protocol(path, trusted=True)
    for place in (folder, folder / "data"):
        for file in place.iterdir() if place.is_dir() else []:
            check_regular(file)
    with explained(f"data.path={path}", Exception):  # of the hub, of file systems, of each format
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(given)
        else:
            found = datasets.load_dataset(given, name, streaming=streaming)
    return dict(found) if hasattr(found, "keys") else {"train": found}


def split_of(tables: Mapping[str, Any], split: str) -> Any:
    """Return the table of a split, whatever its name; None if there is none."""
    return next((tables[name] for name in _NAMES[split] if name in tables), None)


def check_columns(path: str, table: Any, columns: Mapping[str, str]) -> None:
    """Raise DataError if a table has not all of these columns."""
    for key, column in columns.items():
        if key not in ("input", "target"):
            raise DataError(f"data.columns.{key}: unknown; there are input and target")
        if column not in table.column_names:
            known = ", ".join(map(repr, table.column_names))
            raise DataError(f"data.columns.{key}: {path} has no column {column!r}; it has {known}")
