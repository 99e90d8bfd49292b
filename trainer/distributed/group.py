"""The processes of a run, as each of them sees the others: a process alone is a group of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer.errors import StorageError
from trainer.state import TrainState


class Group:
    """A process by itself: what it says to all it says to itself."""

    rank = 0
    local_rank = 0  # on this machine
    world_size = 1

    def join(self, device: torch.device) -> None:
        """Meet the other processes; `device` is the one that this process computes on."""

    def leave(self) -> None:
        """Part from the other processes."""

    @property
    def is_main(self) -> bool:
        """Whether this process decides, writes and prints."""
        return self.rank == 0

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        return [value]

    def barrier(self) -> None:
        """Wait for all processes."""

    def on_main(self, write: Callable[[], object]) -> None:
        """Let the main process write; what keeps it from that is raised on all, a StorageError."""
        failure = None
        if self.is_main:
            try:
                write()
            except StorageError as error:
                failure = str(error)
        failure = self.broadcast(failure)
        if failure is not None:
            raise StorageError(failure)

    def agree(self, state: TrainState, at_once: bool = True, in_step: bool = False) -> None:
        """Make the wish of any process to stop the wish of all, in `state`.

        Without `at_once`, which all pass alike, what one alone wishes may count one call later.
        `in_step`, alike too: before the next call all will have exchanged gradients.
        """
        state.settle()

    def on_signal(self) -> None:
        """Hear of a signal to stop; called within its handler."""

    def failing_together(self) -> AbstractContextManager[Any]:
        """Return the context that tells the others of a failure, and turns theirs into words."""
        return nullcontext()

    def one_per_node(self) -> AbstractContextManager[Any]:
        """Return the context that one process of each machine enters before its others do."""
        return nullcontext()

    def remember(self, key: str, value: str) -> None:
        """Keep a word for the processes that take over after a restart."""

    def recall(self, key: str) -> str | None:
        """Return a word kept before a restart; None if there was none."""
        return None
