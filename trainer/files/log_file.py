"""A logging handler for files: a line that cannot be written is a warning, not an error."""

import logging
from pathlib import Path

from trainer.files.append_log import AppendLog
from trainer.files.log_format import VisibleFormatter

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class LogFileHandler(logging.Handler):
    """Append records to a file as complete lines. Raises StorageError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._log = AppendLog(path)
        self.setFormatter(VisibleFormatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        try:
            self._log.write(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        self._log.close()
        super().close()
