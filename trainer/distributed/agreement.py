"""Agreement of all processes on when to stop, without a wait in every update."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.shared_flags import SharedCount, SharedFlags
from trainer.state import TrainState


class _Count(NamedTuple):
    """The number of processes that request a stop, from an asynchronous all-reduce."""

    total: Tensor
    work: Any

    def result(self) -> int:
        """Wait for the all-reduce and return the sum."""
        self.work.wait()
        return int(self.total)


class Agreement:
    """Stop all processes after the same update when any of them requests a stop.

    Each call starts to count the stop requests and reads the result of the previous call, so that
    the communication overlaps with the next update. A process with a request waits for the count of
    this call. If all processes request a stop (early stopping), all see it and stop at this update,
    as a single process would; otherwise all see it at their next call. `flags` lie in memory that
    the processes share, if they can. They replace the exchange over gloo in a step, whose threads
    would compete for busy cores.
    """

    def __init__(
        self, group: dist.ProcessGroup, world_size: int, flags: SharedFlags | None = None
    ) -> None:
        self._group = group
        self._flags = flags
        self._world_size = world_size
        self._before: _Count | SharedCount | None = None

    def __call__(self, state: TrainState, at_once: bool, in_step: bool) -> None:
        """Stop `state` if a stop has been agreed on.

        All processes pass the same arguments. `at_once`: wait for the count of this call.
        `in_step`: gradients are exchanged between this call and the next.
        """
        request = state.stop_request  # read once: a signal may come at any moment
        before, count = self._before, self._count(request is not None, in_step)
        self._before = count
        agreed = before is not None and before.result() > 0
        if not agreed and at_once:
            agreed = count.result() > 0
        elif not agreed and request is not None:
            agreed = count.result() == self._world_size
        if agreed:
            self._settle(state, request)

    def _count(self, requested: bool, in_step: bool) -> _Count | SharedCount:
        if in_step and self._flags is not None:
            return self._flags.raise_flag(requested)
        total = torch.tensor(int(requested))
        return _Count(total, dist.all_reduce(total, group=self._group, async_op=True))

    def _settle(self, state: TrainState, request: tuple[str, int] | None) -> None:
        """Choose one request: a signal takes precedence, then the lowest rank."""
        requests: list[Any] = [None] * self._world_size
        dist.all_gather_object(requests, request, group=self._group)
        self._before = None  # its requests are handled here
        made = [other for other in requests if other is not None]
        if made:
            state.stop(*max(made, key=lambda other: int(other[1])))
