"""Communication among the processes of a run, over torch.distributed; one is a group, too."""

from __future__ import annotations

import _thread
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainer.distributed.peers import Board, Cause, attempt, peer_trouble, settle_attempt
from trainer.errors import EXIT_CODES, Interrupted, PeerError, StorageError, leave_at_once
from trainer.state import TrainState

_PAUSE = 1e-4  # seconds between two reads of the flag of a late process
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_GRACE = 5.0  # seconds that a process has to stop after another one has failed
# The timeout of GPU collectives exceeds strategy.timeout by this much. NCCL's watchdog kills the
# process that waits, which is not the cause: the collective of the hosts, whose error names the
# cause, must time out first.
_WATCHDOG_LATER = timedelta(seconds=60)


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
