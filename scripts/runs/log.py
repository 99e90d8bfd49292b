"""`train.log`: the log of a run, with the lines from before its directory existed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.files.log_file import LogFileHandler


class Backlog(logging.Handler):
    """Keep log records until there is a file for them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@contextmanager
def backlog() -> Iterator[Backlog]:
    """Collect the log records of the context, to be written to a file later."""
    handler = Backlog()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def logged_to(path: Path | None, earlier: Backlog) -> Iterator[None]:
    """Copy log records to a file, after the earlier ones; with None to no file."""
    if path is None:
        yield
        return
    handler = LogFileHandler(path)
    for record in earlier.records:
        handler.handle(record)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
