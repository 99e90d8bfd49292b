"""Text as it is printed and kept: nothing in it steers a terminal or breaks a line."""

import logging
import re
from pathlib import Path


def visible(text: str) -> str:
    """Make control characters visible, and keep the lines: what was read may steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def indented_lines(text: str) -> list[str]:
    """Return the lines of an error's text, of which only the first begins at the margin.

    Another line break was in something that the error names, such as a file: it is made visible.
    """
    return visible(re.sub(r"\n(?!  )", r"\\n", text)).split("\n")


def on_one_line(text: object) -> str:
    """Return a path or a value as text, its line breaks and control characters visible."""
    return visible(str(text)).replace("\n", "\\n")


class VisibleFormatter(logging.Formatter):
    """Format as the base class does, with control characters and a path's line breaks visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines of what has several."""
        if isinstance(record.args, tuple) and any(isinstance(a, Path) for a in record.args):
            record = logging.makeLogRecord(record.__dict__)
            record.args = tuple(
                on_one_line(a) if isinstance(a, Path) else a for a in record.args or ()
            )
        return visible(super().format(record))
