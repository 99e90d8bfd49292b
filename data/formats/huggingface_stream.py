"""Streams of the package `datasets`, read in order through `regimen.data.streams.Stream`."""

from collections.abc import Iterator, Mapping
from typing import Any

from regimen.data.decode import Channels
from regimen.data.errors import DataError, as_data_error
from regimen.data.formats.huggingface import ArrowRows, check_columns, open_tables, split_of
from regimen.data.splits import Split


class StreamedRows:
    """Rows in the order of the files, or shuffled in a buffer: the `source` of a `Stream`.

    An epoch's order is a function of (seed, epoch). `iter_from` skips rows without decoding them;
    files before the position are not opened if `datasets` knows their lengths.
    """

    def __init__(self, rows: ArrowRows, seed: int, buffer: int | None) -> None:
        self._table = rows.table
        if buffer is not None:
            self._table = self._table.shuffle(seed=seed, buffer_size=buffer)
        self.load = rows.sample  # called by `Stream` for the rows that become samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of a shuffled stream."""
        self._epoch = epoch

    def iter_from(self, position: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows from a position on."""
        table = self._table.skip(position) if position else self._table
        table.set_epoch(self._epoch)  # after `skip`, whose table begins at epoch 0
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
        raise DataError(
            f"data.path={path} has no split {split}, only {', '.join(tables)}: set "
            f"data.{split}=null"
        )
    if hasattr(table, "to_iterable_dataset"):  # a data set that was saved on disk
        # One shard: with several the order would depend on the number of workers.
        table = table.to_iterable_dataset(num_shards=1)
    if table.features is None:
        # CSV and JSON files do not state their types: they are read from the first rows.
        with as_data_error(f"data.path={path}", Exception):
            table = table._resolve_features()
    check_columns(path, table, columns)
    rows = ArrowRows(table, columns, None, channels, tokenizer, length)
    return StreamedRows(rows, seed, buffer)
