"""Flags of the processes of one machine in shared memory, which are read without a thread."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from trainer.distributed.group import Group

_PAUSE = 1e-4  # seconds between two reads of the flag of a late process
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


class SharedCount(NamedTuple):
    """The number of processes that raised their flag at one call."""

    flags: SharedFlags
    call: int

    def result(self) -> int:
        """Wait until all have made that call, as they would at the next exchange of gradients."""
        return self.flags.count(self.call)


class SharedFlags:
    """Cells with the number of a call and a flag, two for each process: for odd and even calls.

    Between two calls all processes must have waited for each other, as they do when gradients are
    exchanged on CPUs. No process can then be two calls ahead and overwrite an unread cell.
    """

    def __init__(self, path: Path, rank: int, world_size: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 16 * world_size)
        self._cells = memoryview(memory).cast("q")
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._call = 0

    def raise_flag(self, raised: bool) -> SharedCount:
        """Make the next call, with the flag raised or not."""
        self._call += 1
        self._cells[self._first(self._call) + self._rank] = 2 * self._call + raised
        return SharedCount(self, self._call)

    def count(self, call: int) -> int:
        """Return how many processes raised their flag at a call, which is one of the last two."""
        deadline, total, first = time.monotonic() + self._timeout, 0, self._first(call)
        for cell in range(first, first + self._world_size):
            while (value := self._cells[cell]) >> 1 != call:
                if time.monotonic() > deadline:
                    raise RuntimeError("timed out waiting for another process")
                time.sleep(_PAUSE)
            total += value & 1
        return total

    def _first(self, call: int) -> int:
        return (call & 1) * self._world_size


def share_flags(group: Group, timeout: float) -> SharedFlags | None:
    """Create the flags of the processes of one machine; None if one cannot map them. Collective."""
    path = group.broadcast(_make_file(group.world_size) if group.is_main else None)
    flags = None
    if path is not None:
        try:
            flags = SharedFlags(Path(path), group.rank, group.world_size, timeout)
        except (OSError, ValueError):  # the folder is in another container
            flags = None
    together = all(group.gather(flags is not None))
    if group.is_main and path is not None:
        os.unlink(path)  # each process has mapped it by now or failed to
    return flags if together else None


def _make_file(world_size: int) -> str | None:
    try:
        descriptor, path = tempfile.mkstemp(prefix="regimen-", dir=_FOLDER)
        with open(descriptor, "wb") as file:
            file.write(bytes(16 * world_size))
    except OSError:
        return None
    return path
