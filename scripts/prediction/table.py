"""A table that grows by whole rows and gets its name once it is complete (I7)."""

from __future__ import annotations

import csv
import fcntl
import importlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from conf.errors import ConfigError, Problem
from data.errors import DataError
from trainer.errors import CheckpointError
from trainer.files.atomic import replacing, write_json
from trainer.files.log_format import on_one_line
from trainer.files.storage import storage_error

_CHUNK = 10_000  # rows of a parquet table that are in memory at once


class GrowingTable:
    """Rows on their way to `path`: lines of JSON in `path`.part, the first of them a header.

    With `resume`, rows of an interrupted command stay, up to the last whole batch of `batch_size`.
    Raises CheckpointError if they were made from something else, StorageError.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], batch_size: int, resume: bool
    ) -> None:
        self.path = path
        self.rows = 0
        self.broken = 0  # of them; known once it is finished
        self._header = dict(header)
        self._part = path.with_name(f"{path.name}.part")
        try:
            self._file: IO[bytes] = open(self._part, "a+b")  # noqa: SIM115 (closed by `close`)
            hold(self._file, self._part)
            self._begin(batch_size, resume)
        except OSError as error:
            raise storage_error(self._part, error) from error

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. Raises StorageError."""
        lines = [json.dumps(row) + "\n" for row in rows]
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
        except OSError as error:
            raise storage_error(self._part, error) from error
        self.rows += len(lines)

    def finish(self) -> None:
        """Write the table in the format of its suffix, and its header beside it."""
        self._file.flush()
        columns = self._columns()
        writers = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
        with replacing(self.path, need=self._file.tell()) as file:
            writers[self.path.suffix](file, columns, self._saved_rows())
        write_json(self.path.with_name(f"{self.path.name}.meta.json"), self._header)
        self.close()
        self._part.unlink()

    def told(self) -> str:
        """Return how many rows there are, and where. Raises DataError if all files were broken."""
        where = on_one_line(self.path)
        if self.rows and self.broken == self.rows:
            raise DataError(f"none of {self.rows} samples could be read: {where} has the reasons")
        broken = f", {self.broken} of them broken" if self.broken else ""
        return f"{self.rows} samples{broken}, written to {where}"

    def close(self) -> None:
        """Let go of the file; the rows stay for `resume=auto`."""
        self._file.close()

    def _begin(self, batch_size: int, resume: bool) -> None:
        kept = self._size_of_batches(batch_size) if resume else 0
        self._file.truncate(kept)
        if not kept:
            self.rows = 0
            self._file.write(json.dumps(self._header).encode() + b"\n")
            self._file.flush()

    def _size_of_batches(self, batch_size: int) -> int:
        """Count the rows of whole batches; return their size in bytes, 0 where there are none."""
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):
            return 0
        if json.loads(first) != json.loads(json.dumps(self._header)):
            raise CheckpointError(
                f"{self._part} was made from another checkpoint, source or option: "
                "remove it, or leave out resume=auto"
            )
        size = end = len(first)
        for count, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if count % batch_size == 0:
                self.rows, size = count, end
        return size

    def _saved_rows(self) -> Iterator[dict[str, Any]]:
        with open(self._part, encoding="utf-8") as lines:
            next(lines)
            for line in lines:
                yield json.loads(line)

    def _columns(self) -> dict[str, Any]:
        """Return each column's first value, in the order of the table; the errors come last."""
        columns: dict[str, Any] = {}
        self.broken = 0
        for row in self._saved_rows():
            self.broken += "error" in row
            for name, value in row.items():
                columns.setdefault(name, value)
        if "error" in columns:
            columns["error"] = columns.pop("error")
        return columns


def check_format(path: Path) -> None:
    """Refuse a table whose library is not installed. Raises ConfigError."""
    if path.suffix == ".parquet":
        _pyarrow("pyarrow.parquet")


def _write_csv(file: IO[bytes], columns: Mapping[str, Any], rows: Iterator[Any]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name, "")) for name in columns])
    text.flush()
    text.detach()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join(str(_cell(part)) for part in value)
    return f"{value:.9g}" if isinstance(value, float) else value  # all digits of a float32


def _write_jsonl(file: IO[bytes], columns: Mapping[str, Any], rows: Iterator[Any]) -> None:
    for row in rows:
        file.write(json.dumps(row).encode() + b"\n")


def _write_parquet(file: IO[bytes], columns: Mapping[str, Any], rows: Iterator[Any]) -> None:
    arrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")
    kinds = {str: arrow.string(), float: arrow.float64(), int: arrow.int64()}

    def kind(value: Any) -> Any:
        if isinstance(value, list):
            return arrow.list_(kind(value[0]) if value else arrow.string())
        return kinds[type(value)]

    schema = arrow.schema([(name, kind(value)) for name, value in columns.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        while chunk := list(itertools.islice(rows, _CHUNK)):
            writer.write_table(arrow.Table.from_pylist(chunk, schema=schema))


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = "install the extra: pip install -e '.[parquet]', or write .csv or .jsonl"
        raise ConfigError([Problem("out", "a .parquet table needs pyarrow", hint=hint)]) from error


def fsync(path: Path) -> None:
    """Make a file's content durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def hold(file: IO[bytes], path: Path) -> None:
    """Keep other processes from writing an open file. Raises ConfigError where one does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        hint = "choose another name"
        problem = Problem("out", f"another process is writing {path}", hint)
        raise ConfigError([problem]) from None
