"""Texts, or pairs of them, with a label or a number, from columns of tables and jsonl files."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regimen.conf.errors import ConfigError
from regimen.data.batch import IGNORED
from regimen.data.errors import DataError, no_column
from regimen.data.formats.huggingface import is_saved, open_tables, split_of
from regimen.data.formats.jsonl import read_rows
from regimen.data.formats.table import SUFFIXES, as_text, read_columns
from regimen.data.splits import Split, class_names, rows_of_train, source_of_split, split_file
from regimen.data.tokenized import Padding, TokenizedSamples, TooLong, encode
from regimen.data.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)
ENDINGS = (".jsonl", *SUFFIXES)  # of the files that are read
NO_LABELS = {None, "-1", "-1.0"}  # of a row; the test sets of GLUE have -1
# The columns of texts of each task of GLUE, as its files on the hub name them. Source: Wang et
# al., "GLUE: A multi-task benchmark and analysis platform for natural language understanding".
GLUE = {
    "ax": ["premise", "hypothesis"],
    "cola": ["sentence"],
    "mnli": ["premise", "hypothesis"],
    "mrpc": ["sentence1", "sentence2"],
    "qnli": ["question", "sentence"],
    "qqp": ["question1", "question2"],
    "rte": ["sentence1", "sentence2"],
    "sst2": ["sentence"],
    "stsb": ["sentence1", "sentence2"],
    "wnli": ["sentence1", "sentence2"],
}


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of a file: their names, for messages, and their values by column."""

    source: str
    names: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def column(self, name: str, key: str) -> Sequence[Any]:
        """Return the column that a key of the configuration names. Raises DataError."""
        if name not in self.columns:
            raise no_column(key, self.source, name, self.columns)
        return self.columns[name]

    def texts(self, name: str) -> list[str]:
        """Return a column of texts. Raises DataError for a value that is none."""
        values = self.column(name, "data.input")
        for row, value in zip(self.names, values, strict=True):
            if not isinstance(value, str):
                raise DataError(f"{row}: column {name!r} is {value!r:.60}, which is no text")
        return list(values)

    def rows(self, numbers: Sequence[int]) -> "Records":
        """Return some of the rows."""
        columns = {}
        for name, values in self.columns.items():
            columns[name] = [values[number] for number in numbers]
        return Records(self.source, [self.names[number] for number in numbers], columns)


def texts(
    root: str,
    split: Split,
    input: str | Sequence[str],
    tokenizer: str | None,
    target: str = "label",
    target_kind: Literal["class", "number"] = "class",
    length: int = 128,
    padding: Padding = "longest",
    too_long: TooLong = "cut",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    fold: int = 0,
    folds: int = 0,
    num_classes: int | None = None,
) -> TokenizedSamples | None:
    """Open one split of texts with a label.

    root: a folder with train, val and test as .csv, .tsv, .parquet or .jsonl, or a single such
        file, or a folder that `datasets` has saved.
    input: the column of the text, or those of two texts, which the tokenizer joins; or the name
        of a task of GLUE, which has these columns.
    target: the column of the label. Classes are those of train, where there is one.
    too_long: of a text with more than `length` tokens: "cut" its end off, or "error".

    Without a file for `val`, a part of train is taken; with `folds` val is fold number `fold` of
    train. A test split may be without labels, also in the form of GLUE, where all are -1: nothing
    is measured on it. None if there is no such split. Raises DataError, with the file and the line,
    and ConfigError.
    """
    columns = input_columns(input)
    find = partial(find_split, root)
    train = find("train")
    if train is None and split == "train":
        raise DataError(
            f"data.root={root}: no such file, nor a folder with a train as {', '.join(ENDINGS)}, "
            "nor one that datasets has saved"
        )
    source: Path | SavedTable | None
    source, is_part = source_of_split(find, split, val_fraction, folds)
    if source is None:
        return None

    records = read_records(source)
    may_lack = split == "test"
    classes = None
    if target_kind == "class":
        known = records
        # An evaluation may open a folder without train: the run says which numbers classes have.
        if train is not None and split != "train" and not is_part:
            known = read_records(train)
        classes = []
        if known is not records or not may_lack or _has_labels(records, target, []):
            classes = _classes(known, target, num_classes, f"data.root={root}")
    has_labels = not may_lack or _has_labels(records, target, classes or [])
    if has_labels:
        targets = _targets(records, target, classes)
    else:
        logger.warning("warning: %s has no labels in column %r", records.source, target)
        targets = torch.full((len(records.names),), IGNORED)
    if is_part:
        strata = np.zeros(len(records.names))
        if classes is not None:
            strata = targets.numpy()
        chosen = rows_of_train(split, strata, val_fraction, split_seed, fold, folds)
        records = records.rows(chosen.tolist())
        targets = targets[chosen]
    samples = tokenized(records, columns, tokenizer, length, padding, too_long)
    samples.targets = targets
    samples.classes = classes
    samples.has_labels = has_labels
    return samples


def input_columns(given: str | Sequence[str]) -> list[str]:
    """Return the names of one or two columns of texts. Raises ConfigError."""
    columns = GLUE.get(given, [given]) if isinstance(given, str) else list(given)
    if not 1 <= len(columns) <= 2 or len({*columns}) < len(columns):
        raise ConfigError(
            "data.input",
            f"is {columns}",
            "give the column of a text, or two different ones, as [premise,hypothesis]",
        )
    return columns


class SavedTable(NamedTuple):
    """A table of `datasets`, and what messages call it."""

    name: str
    table: Any


def find_split(root: str, split: str) -> Path | SavedTable | None:
    """Return the file of a split, or its table of `datasets`; None if there is neither."""
    folder = Path(root).expanduser()
    if not is_saved(folder):
        return split_file(folder, split, ENDINGS)
    table = split_of(open_tables(root, None), split)
    return None if table is None else SavedTable(f"{split} of {folder}", table)


def read_records(source: Path | SavedTable) -> Records:
    """Read a file, or a table of `datasets`, whole. Raises DataError."""
    if isinstance(source, SavedTable):
        return _of_table(source)
    name = source.name.lower()
    if not name.endswith(ENDINGS):
        raise DataError(f"data.root: {source} is none of {', '.join(ENDINGS)}")
    if not name.endswith(".jsonl"):
        # Only an empty cell has no value: `None` may be a text, and `NA` the name of a class.
        table = read_columns(source, missing=("",))
        return Records(str(source), [f"{source}:{line}" for line in table.lines], table.cells)
    rows = list(read_rows(source))
    if not rows:
        raise DataError(f"{source}: holds no row")
    columns: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        for key, value in row.values.items():
            if key not in columns:
                columns[key] = [None] * len(rows)  # of the rows without this key
            columns[key][place] = value
    return Records(str(source), [row.name for row in rows], columns)


def _of_table(source: SavedTable) -> Records:
    name, table = source
    columns = {}
    for column, feature in table.features.items():
        values = list(table[column])
        names = getattr(feature, "names", None)
        if names is not None:
            values = [_class_name(names, number) for number in values]
        columns[column] = values
    return Records(name, [f"{name}:{row}" for row in range(len(table))], columns)


def _class_name(names: Sequence[str], number: int | None) -> str | None:
    if number is None or number < 0:  # -1 stands for a row without a label
        return None
    return names[number]


def _classes(records: Records, target: str, num_classes: int | None, where: str) -> list[str]:
    """Return the names of the classes; none if no row has a label. Raises DataError."""
    names = set[str]()
    for label in records.column(target, "data.target"):
        name = as_text(label)
        if name is not None:
            names.add(name)
    if not names:
        return []
    return class_names(names, num_classes, len(records.names), where)


def _has_labels(records: Records, name: str, classes: Sequence[str]) -> bool:
    """Return whether a row of a test set has a label: -1 is none, unless it is one of `classes`."""
    labels = {as_text(label) for label in records.columns.get(name, ())}
    return not labels <= NO_LABELS - {*classes}


def _targets(records: Records, name: str, classes: list[str] | None) -> Tensor:
    """Return class numbers, or values [n]. Raises DataError."""
    values = list[float]()
    numbers = {label: number for number, label in enumerate(classes or ())}
    for row, value in zip(records.names, records.column(name, "data.target"), strict=True):
        text = as_text(value)
        if text is None:
            raise DataError(f"{row}: no value in column {name!r}, which data.target names")
        if classes is None:
            values.append(_number(row, name, text))
        elif text in numbers:
            values.append(numbers[text])
        else:
            raise DataError(f"{row}: class {text!r} of column {name!r} is not among those of train")
    dtype = torch.int64
    if classes is None:
        dtype = torch.float32
    return torch.tensor(values, dtype=dtype)


def _number(row: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise DataError(
            f"{row}: {text!r} of column {name!r} is no finite number (of 32 bits): "
            "data.target_kind=class says that labels are names"
        )
    return value


def tokenized(
    records: Records,
    columns: Sequence[str],
    tokenizer: str | None,
    length: int,
    padding: Padding = "longest",
    too_long: TooLong = "cut",
) -> TokenizedSamples:
    """Return texts, or pairs of texts, as samples without labels. Raises DataError, ConfigError."""
    shown = {name: records.texts(name) for name in columns}
    encoded = encode(
        load_tokenizer(tokenizer), list(shown.values()), records.names, length, too_long
    )
    remarks = []
    if encoded.cut:
        remarks.append(
            f"{len(encoded.cut):,} texts are longer than data.length={length}: their ends are "
            "cut off"
        )
    form = {
        "kind": "texts",
        "columns": list(columns),
        "tokenizer": tokenizer,
        "length": length,
        "too_long": too_long,
    }
    return TokenizedSamples(
        encoded,
        records.names,
        shown,
        form,
        length=length if padding == "max_length" else None,
        remarks=remarks,
    )
