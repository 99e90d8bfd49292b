"""Standard streams that ignore write errors, so that a closed pipe does not end a run."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast


class _Outlet:
    """A text stream that drops its output after a write error (a closed pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it after an error."""
        try:
            return self._stream.write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer after an error."""
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        # The buffer of the stream goes there as well: Python would flush it again at exit.
        _into_nothing(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Make stdout and stderr ignore write errors, and open streams that were closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(number))
        elif number and not isinstance(stream, _Outlet):
            setattr(sys, name, cast(TextIO, _Outlet(stream)))


def _opened(number: int) -> TextIO:
    """Open the null device for a missing stream, or another file would get its descriptor."""
    try:
        os.fstat(number)
    except OSError:
        _into_nothing(number)
    return open(os.devnull, "w" if number else "r", encoding="utf-8")


def _into_nothing(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
