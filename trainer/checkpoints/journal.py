"""`index.json`, and the changes since it was written, in `index.jsonl`; knows no torch.

To replace the whole index at each save would write as much as the square of the number of
checkpoints. A small index is replaced; of a large one a line with the changes is appended, and the
whole is written again when the lines have become as long as it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.files.append_log import whole_lines
from trainer.files.atomic import sync_folder, write_json
from trainer.files.storage import storage_error

INDEX, CHANGES = "index.json", "index.jsonl"
_SMALL = 1 << 14  # bytes

Content = dict[str, dict[str, Any]]  # entries by name, in sections
Change = tuple[str, str, Any]  # section, name and new value (None: removed)


def read_content(folder: Path) -> Content:
    """Return the index of `folder` with all changes.

    Raises OSError, FileNotFoundError among them, and ValueError, KeyError or TypeError where it is
    damaged. An incomplete last line, which a killed process leaves, is no change.
    """
    content: Content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    try:
        lines = (folder / CHANGES).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return content
    for line in lines:
        for section, name, value in json.loads(line):
            if value is None:
                content[section].pop(name, None)
            else:
                content[section][name] = value
    return content


def write_content(
    folder: Path, changes: Sequence[Change], whole: Callable[[], Content], *, known: bool
) -> None:
    """Bring the index of `folder` up to date, durably; `whole` is called where all is written.

    `changes` are those since it was read, if it is `known`. Raises StorageError.
    """
    size, log = _size(folder / INDEX), _size(folder / CHANGES)
    if size > _SMALL and known:
        log = _append(folder / CHANGES, json.dumps(changes, allow_nan=False))
        if log <= size:
            return
    # Whatever the lines say is in the new index too: to read them once more changes nothing.
    elif log:
        _append(folder / CHANGES, json.dumps(changes, allow_nan=False))
    write_json(folder / INDEX, whole())
    if log:
        try:
            os.unlink(folder / CHANGES)
        except OSError as error:
            raise storage_error(folder / CHANGES, error) from error


def mark(folder: Path) -> list[tuple[int, int, int]]:
    """Return what differs once another process has written the index of `folder`."""
    found = []
    for name in (INDEX, CHANGES):
        with suppress(OSError):
            status = os.stat(folder / name)
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _append(path: Path, line: str) -> int:
    """Append a line durably, or leave the file as it was; return the size of the file."""
    try:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = whole_lines(descriptor)
            os.ftruncate(descriptor, size)
            try:
                rest = memoryview(f"{line}\n".encode())
                length = len(rest)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if new:
            sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    return size + length


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
