"""Processes agree on when to stop, without waiting for each other's answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.shared_flags import SharedCount, SharedFlags
from trainer.state import TrainState


class _Count(NamedTuple):
    """How many processes wish to stop, while it is being added up."""

    total: Tensor
    work: Any

    def result(self) -> int:
        """Wait for the sum."""
        self.work.wait()
        return int(self.total)


class Agreement:
    """Make the wish of any process to stop the wish of all, after the same update.

    Each call begins to count who wishes to stop and looks at what the call before has counted, so
    that the answer travels while the next update is computed. A process with a wish waits for the
    count: where all wish alike (early stopping) all see it, and stop there and then as one
    process would; else all see it at their next call. `flags`, in memory that the processes share
    if they can, spare a step the exchange over gloo, whose threads would wake on busy cores.
    """

    def __init__(
        self, group: dist.ProcessGroup, world_size: int, flags: SharedFlags | None = None
    ) -> None:
        self._group = group
        self._flags = flags
        self._world_size = world_size
        self._before: _Count | SharedCount | None = None

    def __call__(self, state: TrainState, at_once: bool, in_step: bool) -> None:
        """Write into `state` what all have agreed on.

        The same for all are `at_once`, to wait for it, and `in_step`: gradients are exchanged
        between this call and the next.
        """
        wish = state.pending  # read once: a signal may come at any moment
        before, count = self._before, self._count(wish is not None, in_step)
        self._before = count
        agreed = before is not None and before.result() > 0
        if not agreed and at_once:
            agreed = count.result() > 0
        elif not agreed and wish is not None:
            agreed = count.result() == self._world_size
        if agreed:
            self._settle(state, wish)

    def _count(self, wishes: bool, in_step: bool) -> _Count | SharedCount:
        if in_step and self._flags is not None:
            return self._flags.raise_flag(wishes)
        total = torch.tensor(int(wishes))
        return _Count(total, dist.all_reduce(total, group=self._group, async_op=True))

    def _settle(self, state: TrainState, wish: tuple[str, int] | None) -> None:
        """Choose among the wishes: a signal's goes before others, then the first process's."""
        wishes: list[Any] = [None] * self._world_size
        dist.all_gather_object(wishes, wish, group=self._group)
        self._before = None  # what it counts is dealt with
        made = [other for other in wishes if other is not None]
        if made:
            state.stop(*max(made, key=lambda other: int(other[1])))
