"""TensorBoard's event files, written synchronously.

tensorboard's own writer passes records to a thread. When the disk is full that thread dies with a
traceback, and the next write raises its error. Here a record is one `write`, and a failed one
leaves the file unchanged.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from callbacks.support.crc32c import crc32c

_SUFFIX = ".regimen"


class EventFile:
    """Append events to one file of a log directory; every method may raise OSError.

    The file is opened for each record. There are few records, and no file is left open.
    """

    def __init__(self, folder: Path, number: int, kind: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{number}"
        self.path = folder / f"events.out.tfevents.{stamp}{kind and f'.{kind}'}{_SUFFIX}"
        self.size = 0
        self.event(Event(file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append scalars at a step."""
        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summary(step, Summary(value=pairs))

    def summary(self, step: int, summary: Summary) -> None:
        """Append a summary at a step."""
        self.event(Event(step=step, summary=summary))

    def purge(self, step: int) -> None:
        """Make a running TensorBoard drop the values that it has read from `step` on."""
        self.event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def event(self, event: Event) -> None:
        """Append an event completely, or raise OSError and leave the file unchanged."""
        event.wall_time = time.time()
        content = _record(event.SerializeToString())
        # Only the first record makes the file: under its name there may be another run's folder.
        make = 0 if self.size else os.O_CREAT
        with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | make, 0o666), "wb", 0) as file:
            written = _write(file.fileno(), content)
            if written < len(content):
                os.ftruncate(file.fileno(), self.size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += len(content)


def rewind(folder: Path, sizes: Mapping[str, int]) -> None:
    """Truncate our files to the sizes of a checkpoint, and remove those that it does not have."""
    for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])


def _record(content: bytes) -> bytes:
    """Return `content` as a record: its length and itself, each with a checksum.

    tensorboard's function for it imports a stand-in for TensorFlow, with fsspec: 0.4 s.
    """
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    """Return the CRC-32C of `content`, rotated and shifted as TensorFlow's records have it."""
    crc = crc32c(content)
    rotated = (crc >> 15) | (crc << 17)
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _write(descriptor: int, content: bytes) -> int:
    try:
        return os.write(descriptor, content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return 0
        raise
