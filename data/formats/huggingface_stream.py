"""Streams of the package `datasets`, read in order through `regimen.data.streams.Stream`."""

from collections.abc import Iterator, Mapping
from typing import Any

from regimen.data.decode import Channels
from regimen.data.errors import DataError, explained
from regimen.data.formats.huggingface import ArrowRows, check_columns, open_tables, split_of
from regimen.data.splits import Split


class StreamedRows:
    """ArrowRows as they come, or shuffled within a buffer: the `source` of a `Stream`.

    An epoch's order is a function of (seed, epoch). `iter_from` skips rows without decoding them;
    the files before a position are not opened where `datasets` can tell their length.
    """

    def __init__(self, rows: ArrowRows, seed: int, buffer: int | None) -> None:
        table = rows.table
        self._table = table if buffer is None else table.shuffle(seed=seed, buffer_size=buffer)
        self.load = rows.sample  # of a row that is needed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number the order of a shuffled stream depends on."""
        self._epoch = epoch

    def iter_from(self, position: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows from a position on."""
        table = self._table.skip(position) if position else self._table
        table.set_epoch(self._epoch)  # a table made by `skip` begins at epoch 0
        return iter(table)


def streamed(
    path: str,
    split: Split,
    columns: Mapping[str, str],
    name: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    channels: Channels = 3,
    seed: int = 0,
    buffer: int | None = None,
) -> StreamedRows:
    """Open a split of a folder, of files, or of a name on the hub, without loading it.

    `columns`, `name`, `tokenizer` and `length` are those of `huggingface`. A target of classes is a
    ClassLabel or counts from 0: nothing is read to find their names. `buffer`: rows that are
    shuffled together; None: the order of the files. Raises DataError.
    """
    tables = open_tables(path, name, streaming=True)
    table = split_of(tables, split)
    if table is None:
        have = f"data.path={path} has no split {split}, only {', '.join(tables)}"
        raise DataError(f"{have}: set data.{split}=null")
    if hasattr(table, "to_iterable_dataset"):  # saved on disk
        table = table.to_iterable_dataset(num_shards=1)  # its order does not depend on workers
    if table.features is None:
        with explained(f"data.path={path}", Exception):  # of file systems and of each format
            table = table._resolve_features()  # from the first rows; CSV and JSON tell no types
    check_columns(path, table, columns)
    rows = ArrowRows(table, columns, None, channels, tokenizer, length)
    return StreamedRows(rows, seed, buffer)
