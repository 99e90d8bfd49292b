"""A pseudo terminal, and what a person would see on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading

_PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """A pseudo terminal of a width, and all that is written to it.

    `stream` writes to it; `frames` and `rows` close it.
    """

    def __init__(self, columns: int = 120) -> None:
        self.columns = columns
        self._master, self.slave = os.openpty()
        self.resize(columns)
        self.stream = os.fdopen(self.slave, "w", encoding="utf-8")
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._collect)
        self._reader.start()

    def resize(self, columns: int) -> None:
        """Change the width."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def text(self) -> str:
        """Close the terminal and return all that was written."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return b"".join(self._read).decode()

    def frames(self) -> list[str]:
        """Return what a line held, each time it was written anew."""
        found = re.split(r"[\r\n]+|\x1b\[\d*[AK]", self.text())
        return [frame.rstrip() for frame in found if frame.strip()]

    def rows(self) -> list[str]:
        """Return what the terminal shows in the end."""
        return rows_of(self.text(), self.columns)

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # the last writer has closed it
            while chunk := os.read(self._master, 65536):
                self._read.append(chunk)


def rows_of(text: str, columns: int) -> list[str]:
    """Return the rows of a terminal that has been written `text`; AssertionError for a new code."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for number, letter, sign in _PART.findall(text):
        if sign == "\n":
            row += 1
        elif sign == "\r":
            column = 0
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            del rows[row][column:]
        else:
            assert sign, f"the terminal of the tests does not know ESC [ {number}{letter}"
            if column == columns:
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = sign
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    return ["".join(row).rstrip() for row in rows]
