"""Streaming data sets of the package `datasets`, read in order through `data.streams.Stream`."""

from collections.abc import Iterator, Mapping
from typing import Any

from data.errors import DataError, reason, shortened
from data.formats.huggingface import (
    ArrowRows,
    check_columns,
    import_tokenizer,
    split_of,
    tables,
    undecoded,
)
from data.sources import Split

_SHARDS = 1  # a saved table is one: its order does not depend on workers


class StreamedRows:
    """ArrowRows as they come, or shuffled within a buffer: the `source` of a `Stream`.

    An epoch's order is a function of (seed, epoch). `iter_from` skips rows without decoding them;
    the files before a position are not opened where `datasets` can tell their length.
    """

    def __init__(self, table: Any, rows: ArrowRows, seed: int, buffer: int | None) -> None:
        self._table = table if buffer is None else table.shuffle(seed=seed, buffer_size=buffer)
        self._rows = rows
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number the order of a shuffled stream depends on."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield numbers and rows from a position on."""
        table = self._table.skip(position) if position else self._table
        table.set_epoch(self._epoch)  # a table made by `skip` begins at epoch 0
        return enumerate(table, start=position)

    def load(self, item: tuple[int, Mapping[str, Any]]) -> Any:
        """Return the sample of a row: (input, target), or the input alone without a target."""
        number, row = item
        return self._rows.sample(row, number)


def streamed(
    path: str,
    split: Split,
    columns: Mapping[str, str],
    name: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    channels: int = 3,
    seed: int = 0,
    buffer: int | None = None,
) -> StreamedRows:
    """Open a split of a folder, of files, or of a name on the hub, without loading it.

    `columns`, `name`, `tokenizer` and `length` are those of `huggingface.huggingface`. A target of
    classes is a ClassLabel or counts from 0: nothing is read to find their names. `buffer`: rows
    that are shuffled together; None: the order of the files. Raises DataError.
    """
    found = tables(path, name, streaming=True)
    known = split_of(found, split)
    if known is None:
        have = f"data.path={path} has no split {split}, only {', '.join(found)}"
        raise DataError(f"{have}: set data.{split}=null")
    table = _typed(known, path)
    check_columns(path, table, columns)
    table = undecoded(table, columns)
    words = None if tokenizer is None else import_tokenizer(tokenizer)
    rows = ArrowRows(table, columns, None, channels, words, length)
    return StreamedRows(table, rows, seed, buffer)


def _typed(table: Any, path: str) -> Any:
    """Return a streaming table that knows the types of its columns."""
    if hasattr(table, "to_iterable_dataset"):  # saved on disk
        table = table.to_iterable_dataset(num_shards=_SHARDS)
    if table.features is not None:
        return table
    try:
        return table._resolve_features()  # from the first rows; CSV and JSON tell no types
    except Exception as error:  # of file systems and of each format
        raise DataError(f"data.path={path}: {shortened(reason(error))}") from error
