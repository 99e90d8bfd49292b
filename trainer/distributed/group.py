"""Communication among the processes of a run; a single process is a group of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer.errors import StorageError
from trainer.state import TrainState


class Group:
    """The group of a single process, whose collectives return their own input."""

    rank = 0
    local_rank = 0  # on this machine
    world_size = 1

    def join(self, device: torch.device) -> None:
        """Initialize the group; `device` is the device that this process computes on."""

    def leave(self) -> None:
        """Destroy the group."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which decides, writes and prints."""
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
        """Call `write` on the main process; a StorageError there is raised on all processes."""
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
        """Stop all processes if any of them requests it, by setting `state`.

        All processes pass the same arguments. Without `at_once` the request of a single process may
        take effect one call later. `in_step`: gradients are exchanged before the next call.
        """
        state.settle()

    def on_signal(self) -> None:
        """React to a signal to stop; called within the signal handler."""

    def failing_together(self) -> AbstractContextManager[Any]:
        """Return a context that reports a failure to the others, and raises theirs as PeerError."""
        return nullcontext()

    def one_per_node(self) -> AbstractContextManager[Any]:
        """Return a context that one process of each machine enters and leaves before the others."""
        return nullcontext()

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory for the processes that continue after a restart."""

    def recall_run(self) -> str | None:
        """Return the run directory from before a restart; None if there is none."""
        return None
