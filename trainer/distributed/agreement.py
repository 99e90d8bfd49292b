"""Agreement of all processes on when to stop, without a wait in every update."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.group import Group
from trainer.state import TrainState

_PAUSE = 1e-4  # seconds between two reads of the flag of a late process
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Agreement:
    """Stop all processes after the same update when any of them requests a stop.

    Each call starts to count the stop requests and reads the count of the previous call, so that
    the communication overlaps with the next update. A process with a request waits for the count of
    this call. If all processes request a stop (early stopping), all see it and stop at this update,
    as a single process would; otherwise all see it at their next call.

    `flags` (of `shared_flags`) replace the exchange over gloo in a step, whose threads compete for
    busy cores: 6% of an update of 14 ms. Each is the number of a call and a bit, two for each
    process: for odd and even calls. Between two calls in a step all processes wait for each other,
    so none is ever two calls ahead and overwrites an unread flag.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: timedelta, flags: memoryview | None = None
    ) -> None:
        self._group, self._flags = group, flags
        self._rank, self._size = group.rank(), group.size()
        self._timeout = timeout.total_seconds()
        self._calls = 0  # that raised or lowered a flag
        self._before: Callable[[], int] | None = None

    def __call__(self, state: TrainState, at_once: bool, in_step: bool) -> None:
        """Stop `state` if a stop has been agreed on; all processes pass the same arguments.

        `at_once`: wait for the count of this call. `in_step`: gradients are exchanged between this
        call and the next.
        """
        request = state.stop_request  # read once: a signal may come at any moment
        before, count = self._before, self._count(request is not None, in_step)
        self._before = count
        agreed = before is not None and before() > 0
        if not agreed and at_once:
            agreed = count() > 0
        elif not agreed and request is not None:
            agreed = count() == self._size
        if not agreed:
            return
        requests: list[Any] = [None] * self._size
        dist.all_gather_object(requests, request, group=self._group)
        self._before = None  # its requests are handled here
        made = [other for other in requests if other is not None]
        if made:  # a signal takes precedence, then the lowest rank
            state.stop(*max(made, key=lambda other: int(other[1])))

    def _count(self, requested: bool, in_step: bool) -> Callable[[], int]:
        """Start to count the requests of this call; what is returned waits for their number."""
        if in_step and self._flags is not None:
            self._calls += 1
            flags = self._flags[self._calls % 2 * self._size :][: self._size]
            flags[self._rank] = 2 * self._calls + requested
            return partial(self._raised, flags, self._calls)
        total = torch.tensor(int(requested))
        work = dist.all_reduce(total, group=self._group, async_op=True)

        def summed() -> int:
            work.wait()
            return int(total)

        return summed

    def _raised(self, flags: memoryview, call: int) -> int:
        deadline = time.monotonic() + self._timeout
        while any(flag >> 1 != call for flag in flags):
            if time.monotonic() > deadline:
                raise RuntimeError("timed out waiting for another process")
            time.sleep(_PAUSE)
        return sum(flag & 1 for flag in flags)


def shared_flags(group: Group) -> memoryview | None:
    """Return memory that the processes of one machine share, two integers for each; a collective.

    None: there is no room for it.
    """
    path = None
    if group.is_main:
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="regimen-", dir=_MEMORY)
            with open(descriptor, "wb") as file:
                file.write(bytes(16 * group.world_size))
            path = name
    path = group.broadcast(path)
    if path is None:
        return None
    with open(path, "r+b") as file:
        flags = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    group.barrier()
    if group.is_main:
        os.unlink(path)
    return flags
