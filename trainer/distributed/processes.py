"""Groups of several processes over torch.distributed."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainer.distributed.agreement import Agreement, shared_flags
from trainer.distributed.group import Group
from trainer.distributed.peers import Board, Cause, attempt, peer_trouble, settle_attempt
from trainer.errors import EXIT_CODES, Interrupted, PeerError, leave_at_once
from trainer.state import TrainState

_GRACE = 5.0  # seconds that a process has to stop after another one has failed
# The timeout of GPU collectives exceeds strategy.timeout by this much. NCCL's watchdog kills the
# process that waits, which is not the cause: the collective of the hosts, whose error names the
# cause, must time out first.
_WATCHDOG_LATER = timedelta(seconds=60)


def is_rank() -> bool:
    """Return whether a launcher (torchrun or ours) started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class ProcessGroup(Group):
    """The processes that a launcher started, over torch.distributed.

    `control` is the gloo group for communication between hosts, whichever backend the devices use.
    It exists from `join` on.
    """

    control: dist.ProcessGroup
    _agreement: Agreement
    _board: Board

    def __init__(self, backend: str, timeout: float) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.backend = backend
        self.timeout = timedelta(seconds=timeout)
        self.recognize: Callable[[Exception], Exception | None] = lambda _: None  # a strategy's
        self._failed = False

    def join(self, device: torch.device) -> None:
        """Initialize the process groups, without the keys of an attempt before a restart."""
        store, rank, world_size = next(rendezvous("env://", timeout=self.timeout))
        settle_attempt(store, rank, world_size, self.timeout)
        self._board = Board(store, rank)
        on_gpus = device.type == "cuda"
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"regimen/group-{attempt()}", store),
            rank=rank,
            world_size=world_size,
            timeout=self.timeout + _WATCHDOG_LATER if on_gpus else self.timeout,
            device_id=device if on_gpus else None,
        )
        # A group of its own, so that communication between hosts never waits for a device.
        control = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(control, dist.ProcessGroup)
        self.control = control
        # With GPUs only the device waits for a collective: hosts may be several updates apart.
        together = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
        on_host = together and device.type == "cpu"
        flags = shared_flags(self) if on_host else None
        self._agreement = Agreement(control, self.timeout, flags)

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    def agree(self, state: TrainState, at_once: bool = True, in_step: bool = False) -> None:
        """Stop all processes after the same update if any of them requests it."""
        self._agreement(state, at_once, in_step)

    def on_signal(self) -> None:
        """Exit if the signal was sent because another process failed, and this one hangs."""

        def leave_with_the_failed() -> None:
            wait = threading.Event()
            while not wait.wait(_GRACE):
                if self._board.cause() is not None:
                    leave_at_once(PeerError.exit_code)

        # `threading` takes locks that the interrupted code may hold.
        _thread.start_new_thread(leave_with_the_failed, ())

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier(group=self.control)

    @contextmanager
    def one_per_node(self) -> Iterator[None]:
        """Run the context on the first process of each machine before the others (downloads)."""
        if self.local_rank:
            self.barrier()
        yield
        if not self.local_rank:
            self.barrier()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Report a failure to the other processes, and raise a failure of theirs as PeerError."""
        try:
            yield
        except Interrupted:  # all processes are interrupted together
            raise
        except Exception as error:
            self._failed = True
            for number in EXIT_CODES:  # the launcher stops the others: this one already ends
                signal.signal(number, signal.SIG_IGN)
            told = self.recognize(error) or self._told_by_peer(error) or error
            self._board.claim(Cause.of(told, self.rank))
            if told is error:
                raise
            raise told from error

    def _told_by_peer(self, error: Exception) -> PeerError | None:
        """Return a PeerError if `error` shows that another process is lost, with why if it said."""
        trouble = peer_trouble(error, self.timeout)
        cause = self._board.cause() if trouble is not None else None
        if cause is None:
            return trouble
        told = PeerError(f"process {cause.rank} failed: {cause.text}")
        told.exit_code = cause.code
        told.add_note(f"Process {cause.rank}:\n{cause.traceback}")
        return told

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory in the launcher's store."""
        self._board.remember_run(run_dir)

    def recall_run(self) -> str | None:
        """Return the run directory of an earlier attempt."""
        return self._board.recall_run()

    def leave(self) -> None:
        """Destroy the group, after a barrier so that no process still waits in a collective.

        After a failure there is no barrier: the process exits and its connections close.
        """
        if dist.is_initialized() and not self._failed:
            self.barrier()
            dist.destroy_process_group()
