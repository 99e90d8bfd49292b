"""TensorBoard's event files, written by the thread that has something to say.

tensorboard's own writer hands records to a thread; once the disk is full that thread dies with a
traceback and raises in whoever writes next. Here a record is one `write`, and one that fails
leaves the file as it was.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

_SUFFIX = ".regimen"


class EventFile:
    """Append events to one file of a log directory; every method may raise OSError.

    The file is opened for each record: some do at a log boundary, and nothing is left open.
    """

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        host = socket.gethostname()
        self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.{host}.{number}{_SUFFIX}"
        self.size = 0
        self.event(Event(file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append values at a step."""
        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summary(step, Summary(value=pairs))

    def summary(self, step: int, summary: Summary) -> None:
        """Append any summary at a step."""
        self.event(Event(step=step, summary=summary))

    def purge(self, step: int) -> None:
        """Make a TensorBoard that is watching drop what it has seen from `step` on."""
        self.event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def event(self, event: Event) -> None:
        """Append an event, whole or not at all."""
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        content = record.getvalue()
        with open(self.path, "ab", buffering=0) as file:
            written = _write(file.fileno(), content)
            if written < len(content):
                os.ftruncate(file.fileno(), self.size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += len(content)


def rewind(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut our files to these sizes and remove those without one: a checkpoint knows none of it."""
    for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])


def _write(descriptor: int, content: bytes) -> int:
    try:
        return os.write(descriptor, content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return 0
        raise
