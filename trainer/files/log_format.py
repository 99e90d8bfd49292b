"""Make text safe to print and to log: escape control characters and line breaks."""

import logging
import re
from pathlib import Path


def visible(text: str) -> str:
    """Escape control characters, which could control a terminal, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def indented_lines(text: str) -> list[str]:
    """Return the lines of an error's text, of which all but the first are indented.

    A line break before an unindented line is part of a value, such as a file name: it is escaped.
    """
    return visible(re.sub(r"\n(?!  )", r"\\n", text)).split("\n")


def on_one_line(text: object) -> str:
    """Return a path or a value as text, with line breaks and control characters escaped."""
    return visible(str(text)).replace("\n", "\\n")


class VisibleFormatter(logging.Formatter):
    """Format as the base class does, and escape control characters and line breaks in paths."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record, which may have several lines."""
        if isinstance(record.args, tuple) and any(isinstance(a, Path) for a in record.args):
            record = logging.makeLogRecord(record.__dict__)
            record.args = tuple(
                on_one_line(a) if isinstance(a, Path) else a for a in record.args or ()
            )
        return visible(super().format(record))
