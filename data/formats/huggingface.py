"""Data sets of the Hugging Face package `datasets`: saved, from files, by name."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regimen.conf.addresses import check_protocol, is_address
from regimen.conf.errors import problems_at
from regimen.data.decode import Channels, Range, decode_image, read_content
from regimen.data.errors import DataError, as_data_error, check_regular, import_package, no_column
from regimen.data.image_folder import picture_form
from regimen.data.splits import NAMES, Split, class_names, rows_of_train, source_of_split
from regimen.data.tokenizers import load_tokenizer
from regimen.data.transforms import Transform, on_inputs


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
        input_feature = table.features[columns["input"]]
        target_feature = table.features.get(columns.get("target"))
        self._is_picture = type(input_feature).__name__ == "Image"
        self._has_class_numbers = type(target_feature).__name__ == "ClassLabel"
        if self._is_picture:
            # The bytes of its files, which `decode_image` decodes as those of any data set.
            undecoded = import_package("datasets", "huggingface").Image(decode=False)
            table = table.cast_column(columns["input"], undecoded)
        self.table = table
        self._columns = columns
        self._class_numbers = {name: number for number, name in enumerate(classes or ())}
        self._renumbered: list[int] | None = None
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._length = length
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
        if not self._is_picture:
            return {"kind": "array"}
        return picture_form(self.channels, self.value_range)

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.table[index])

    def sample(self, row: Mapping[str, Any]) -> Any:
        """Return the sample of a row. Raises DataError."""
        inputs = self._inputs(row[self._columns["input"]])
        if "target" not in self._columns:
            return on_inputs(self.transform, inputs)
        target = row[self._columns["target"]]
        target = self._class(target) if self._class_numbers else _tensor(target)
        return on_inputs(self.transform, (inputs, target))

    def renumber(self, numbers: list[int]) -> None:
        """Give each class a new number, by its number so far."""
        self._renumbered = numbers

    def _inputs(self, value: Any) -> Any:
        if value is None:
            raise DataError(f"column {self._columns['input']!r}: no value")
        if self._is_picture:
            content = value["bytes"] or read_content(value["path"])
            name = value["path"] or "its picture"
            return decode_image(content, name, self.channels, self.value_range)
        if not isinstance(value, str):
            return _tensor(value)
        if self._tokenizer is None:
            return value
        tokens = self._tokenizer(
            value, truncation=True, padding="max_length", max_length=self._length
        )
        return {name: torch.tensor(values) for name, values in tokens.items()}

    def _class(self, value: Any) -> int:
        """Return the class number of a target; a negative one, of a row without a label, stays."""
        if self._has_class_numbers:
            number = int(value)
        elif str(value) in self._class_numbers:
            number = self._class_numbers[str(value)]
        else:
            column = self._columns["target"]
            raise DataError(f"column {column!r}: class {value!r} is not among those of train")
        if self._renumbered is None or number < 0:
            return number
        return self._renumbered[number]


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
    train. Returns None if there is no such split. Raises DataError.
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
            names = {str(value) for value in train[columns["target"]]}
            classes = class_names(names, num_classes, len(train), f"data.path={path}")
    table, is_part = source_of_split(partial(split_of, tables), split, val_fraction, folds)
    if is_part:
        labels = np.zeros(len(train)) if classes is None else train[columns["target"]]
        table = train.select(rows_of_train(split, labels, val_fraction, split_seed, fold, folds))
    if table is None:
        return None
    return ArrowRows(table, columns, classes, channels, tokenizer, length, transform, value_range)


def open_tables(path: str, name: str | None, streaming: bool = False) -> dict[str, Any]:
    """Return the splits of a data set by their own names. Raises DataError."""
    datasets = import_package("datasets", "huggingface")
    folder = Path(path).expanduser()
    local_path = str(folder) if folder.exists() else path
    if is_address(path):
        with problems_at("data.path"):
            check_protocol(path, trusted=True)
    # The hub, file systems and the readers of each format raise errors of their own.
    with as_data_error(f"data.path={path}", Exception):
        for place in (folder, folder / "data"):
            if not place.is_dir():
                continue
            for file in place.iterdir():
                if file.exists():  # a link that leads nowhere is read by nobody
                    check_regular(file)
        if is_saved(folder):
            tables = datasets.load_from_disk(local_path)
        else:
            tables = datasets.load_dataset(local_path, name, streaming=streaming)
    return dict(tables) if hasattr(tables, "keys") else {"train": tables}


def is_saved(folder: Path) -> bool:
    """Return whether `datasets` has saved a table, or one for each split, in a folder."""
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def split_of(tables: Mapping[str, Any], split: str) -> Any:
    """Return the table of a split under any of its usual names, or None."""
    return next((tables[name] for name in NAMES[split] if name in tables), None)


def check_columns(path: str, table: Any, columns: Mapping[str, str]) -> None:
    """Raise DataError for keys other than `input` and `target`, and for missing columns."""
    for key, column in columns.items():
        if key not in ("input", "target"):
            raise DataError(f"data.columns.{key}: unknown; there are input and target")
        if column not in table.column_names:
            raise no_column(f"data.columns.{key}", path, column, table.column_names)
