"""Standard streams that outlive their readers: a run is not lost because nobody listens."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast


class _Outlet:
    """A text stream that falls silent once it cannot be written (a closed pipe, a full disk)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop what nobody can take."""
        try:
            return self._stream.write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        """Hand on what was written, or drop it."""
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        # What the stream still holds goes there too: it would be tried again as Python ends.
        _into_nothing(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Let stdout and stderr swallow what they cannot write, and open those that were closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(number))
        elif number and not isinstance(stream, _Outlet):
            setattr(sys, name, cast(TextIO, _Outlet(stream)))


def _opened(number: int) -> TextIO:
    """Put the null device where a standard stream is missing, or a file would get its number."""
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
