"""Append-only logs of complete lines: a line that cannot be written is a warning."""

import contextlib
import logging
import os
from pathlib import Path

from trainer.files.atomic import storage_error
from trainer.files.layout import VisibleFormatter

_BLOCK = 1 << 16
_log = logging.getLogger(__name__)


class AppendLog:
    """Append lines to a file; after an OSError it warns once and the run continues.

    Opening removes an incomplete last line, which a killed process leaves. It raises StorageError,
    since nothing is lost at that point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        try:
            # A link in a run of somebody else's could lead anywhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o666)
            self._size = _whole_lines(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            raise storage_error(path, error) from error

    def write(self, line: str) -> None:
        """Append `line`, with a newline if it has none."""
        content = memoryview((line if line.endswith("\n") else line + "\n").encode())
        try:
            rest = content
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._size += len(content)
        except OSError as error:
            # An incomplete line would be joined with the next one once there is space again.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self._warn(error)

    def offset(self) -> int:
        """Flush the file to disk and return its size in bytes."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._warn(error)
        return self._size

    def truncate(self, offset: int) -> None:
        """Truncate the file to `offset`; warn if it is shorter, since it has lost lines."""
        if offset > self._size:
            _log.warning("%s lost %d bytes of earlier lines", self.path, offset - self._size)
            return
        try:
            os.ftruncate(self._descriptor, offset)
            self._size = offset
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; training continues without it", storage_error(self.path, error))


class LogFileHandler(logging.StreamHandler[AppendLog]):
    """Append records to a file as complete lines. Raises StorageError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(AppendLog(path))  # opened first: what logging knows of closes at exit
        self.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))

    def close(self) -> None:
        """Close the file."""
        self.stream.close()
        super().close()


def _whole_lines(descriptor: int) -> int:
    """Return the offset after the last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
