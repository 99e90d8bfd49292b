"""`train.log`: a run's log lines with their times, the ones before it had a directory first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.files.log_file import LogFileHandler


class Backlog(logging.Handler):
    """Keep log lines until there is a file for them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.records.append(record)


@contextmanager
def backlog() -> Iterator[Backlog]:
    """Keep the log lines of a context, for the file that comes after it."""
    handler = Backlog()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def logged_to(path: Path | None, earlier: Backlog) -> Iterator[None]:
    """Copy log lines to a file, the earlier ones first; None: to no file."""
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
