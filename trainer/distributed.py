"""The processes of a run: how they meet, exchange, stop and fail; one is a group, too."""

from __future__ import annotations

import _thread
import json
import mmap
import os
import re
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer.errors import (
    EXIT_CODES,
    Interrupted,
    PeerError,
    SilentPeerError,
    StorageError,
    leave_at_once,
)
from trainer.state import TrainState

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PATIENCE = timedelta(seconds=10)
_PAUSE = 0.02  # seconds between two polls of the store
_SHORT_PAUSE = 1e-4  # seconds between two reads of the flag of a late process
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_GRACE = 5.0  # seconds that a process has to stop after another one has failed
# The timeout of GPU collectives exceeds strategy.timeout by this much. NCCL's watchdog kills the
# process that waits, which is not the cause: the collective of the hosts, whose error names the
# cause, must time out first.
_WATCHDOG_LATER = timedelta(seconds=60)
# Parts of the errors that torch's process groups raise when a peer is gone, in any call.
_LOST = re.compile(
    "connection (closed by peer|reset by peer|refused)|broken pipe|gloo/transport"
    "|nccl communicator was aborted|remote process exited"
)
_SILENT = re.compile("timed out (waiting|after)|watchdog caught collective operation timeout")


class Cause(NamedTuple):
    """The first failure of a group."""

    rank: int
    code: int  # the exit code of the run
    text: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Cause:
        """Describe an exception."""
        code = getattr(error, "exit_code", 1)
        text = str(error) if code != 1 else f"{type(error).__name__}: {error}"
        return cls(rank, code, text, "".join(traceback.format_exception(error)))


class Board:
    """Two keys in the store of the group, which lives as long as the process that hosts it."""

    def __init__(self, store: Store, rank: int) -> None:
        self.run = PrefixStore("regimen/run", store)
        self._attempt = PrefixStore(f"regimen/attempt-{attempt()}", store)
        self._rank = rank

    def claim(self, cause: Cause) -> bool:
        """Return whether this process is the first to fail; all then report its `cause`."""
        try:
            first = Cause(*json.loads(self._attempt.compare_set("cause", "", json.dumps(cause))))
            return first.rank == self._rank
        except (RuntimeError, ValueError):  # the process that hosts the store is gone
            return True

    def cause(self) -> Cause | None:
        """Return why another process failed; None if no other process has reported a failure."""
        try:
            if not self._attempt.check(["cause"]):
                return None
            cause = Cause(*json.loads(self._attempt.get("cause")))
        except (RuntimeError, ValueError):
            return None
        return None if cause.rank == self._rank else cause


def agent_board() -> Board | None:
    """Connect to the store of the launcher that started this process; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=_PATIENCE)
    except (RuntimeError, KeyError, ValueError):
        return None
    return Board(store, int(os.environ["RANK"]))


def attempt() -> str:
    """Return the number of this attempt; "0" for the first and without a launcher."""
    return os.environ.get(_ATTEMPT, "0")


def agreed_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a number that is shared by all processes of this attempt and by no other attempt.

    The launcher of a node counts only the restarts that its own processes caused. So the main
    process counts, and publishes the number until each process has acknowledged it. The store may
    still name a process of an earlier attempt: that one never acknowledges, but its replacement
    registers itself soon.
    """
    calls = PrefixStore("regimen/attempts", store)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if rank:
            name = uuid.uuid4().hex
            calls.set(f"here/{rank}", name)
            number = calls.get(f"number/{name}").decode()
            calls.set(f"heard/{number}/{name}", "")
            return number
        number = str(calls.add("count", 1) - 1)
        while time.monotonic() < deadline:
            here = calls.multi_get([f"here/{other}" for other in range(1, world_size)])
            names = [name.decode() for name in here]
            for name in names:
                calls.set(f"number/{name}", number)
            if calls.check([f"heard/{number}/{name}" for name in names]):
                return number
            time.sleep(_PAUSE)
    except dist.DistStoreError:
        pass
    raise SilentPeerError.after(timeout.total_seconds())


def is_rank() -> bool:
    """Return whether a launcher (torchrun or ours) started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Group:
    """The group of a single process, whose collectives return their own input."""

    rank = 0
    local_rank = 0  # on this machine
    world_size = 1
    control: dist.ProcessGroup | None = None  # of several: between hosts, whatever devices use

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


class ProcessGroup(Group):
    """The processes that a launcher started, over torch.distributed."""

    _board: Board

    def __init__(self, backend: str, timeout: float) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.backend = backend
        self.timeout = timedelta(seconds=timeout)
        self.recognize: Callable[[Exception], Exception | None] = lambda _: None  # a strategy's
        self._failed = False
        self._flags: memoryview | None = None
        self._calls = 0  # of `agree` that raised or lowered a flag
        self._before: Callable[[], int] | None = None  # waits for the count of the previous call

    def join(self, device: torch.device) -> None:
        """Initialize the process groups, without the keys of an attempt before a restart."""
        store, rank, world_size = next(rendezvous("env://", timeout=self.timeout))
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            os.environ[_ATTEMPT] = agreed_attempt(store, rank, world_size, self.timeout)
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
        if device.type == "cpu" and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            self._share_flags()

    def _share_flags(self) -> None:
        """Let the processes of this machine share memory, two integers for each, if there is any.

        The flags replace an exchange over gloo, whose threads compete for busy cores: 6% of an
        update of 14 ms.
        """
        path = None
        if self.is_main:
            with suppress(OSError):
                descriptor, name = tempfile.mkstemp(prefix="regimen-", dir=_MEMORY)
                with open(descriptor, "wb") as file:
                    file.write(bytes(16 * self.world_size))
                path = name
        if (path := self.broadcast(path)) is None:
            return
        with open(path, "r+b") as file:
            self._flags = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        dist.barrier(group=self.control)
        if self.is_main:
            os.unlink(path)

    def leave(self) -> None:
        """Destroy the group, after a barrier so that no process still waits in a collective.

        After a failure there is no barrier: the process exits and its connections close.
        """
        if dist.is_initialized() and not self._failed:
            dist.barrier(group=self.control)
            dist.destroy_process_group()

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

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

    def agree(self, state: TrainState, at_once: bool = True, in_step: bool = False) -> None:
        """Stop all processes after the same update if any of them requests it.

        Each call starts to count the requests and reads the count of the previous call, so that the
        communication overlaps with the next update. A process with a request waits for the count of
        this call. If all processes request a stop (early stopping), all see it and stop at this
        update, as a single process would; otherwise all see it at their next call.
        """
        request = state.stop_request  # read once: a signal may come at any moment
        before, count = self._before, self._count(request is not None, in_step)
        self._before = count
        agreed = before is not None and before() > 0
        if not agreed and at_once:
            agreed = count() > 0
        elif not agreed and request is not None:
            agreed = count() == self.world_size
        if not agreed:
            return
        made = [other for other in self.gather(request) if other is not None]
        self._before = None  # its requests are handled here
        if made:  # a signal takes precedence, then the lowest rank
            state.stop(*max(made, key=lambda other: int(other[1])))

    def _count(self, requested: bool, in_step: bool) -> Callable[[], int]:
        """Start to count the requests of this call; what is returned waits for their number.

        A flag is the number of a call and a bit, two for each process: for odd and even calls.
        Between two calls in a step all processes wait for each other, so none is ever two calls
        ahead and overwrites an unread flag.
        """
        if in_step and self._flags is not None:
            self._calls += 1
            flags = self._flags[self._calls % 2 * self.world_size :][: self.world_size]
            flags[self.rank] = 2 * self._calls + requested
            return partial(self._raised, flags, self._calls)
        total = torch.tensor(int(requested))
        work = dist.all_reduce(total, group=self.control, async_op=True)

        def summed() -> int:
            work.wait()
            return int(total)

        return summed

    def _raised(self, flags: memoryview, call: int) -> int:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while any(flag >> 1 != call for flag in flags):
            if time.monotonic() > deadline:
                raise RuntimeError("timed out waiting for another process")
            time.sleep(_SHORT_PAUSE)
        return sum(flag & 1 for flag in flags)

    def on_signal(self) -> None:
        """Exit if the signal was sent because another process failed, and this one hangs."""

        def leave_with_the_failed() -> None:
            wait = threading.Event()
            while not wait.wait(_GRACE):
                if self._board.cause() is not None:
                    leave_at_once(PeerError.exit_code)

        # `threading` takes locks that the interrupted code may hold.
        _thread.start_new_thread(leave_with_the_failed, ())

    @contextmanager
    def one_per_node(self) -> Iterator[None]:
        """Run the context on the first process of each machine before the others (downloads)."""
        if self.local_rank:
            dist.barrier(group=self.control)
        yield
        if not self.local_rank:
            dist.barrier(group=self.control)

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
        if not isinstance(error, RuntimeError):
            return None
        if _SILENT.search(text := str(error).lower()):
            lost: PeerError = SilentPeerError.after(self.timeout.total_seconds())
        elif isinstance(error, dist.DistError) or _LOST.search(text):
            lost = PeerError("another process of the run was lost")
        else:
            return None
        if (cause := self._board.cause()) is None:
            return lost
        told = PeerError(f"process {cause.rank} failed: {cause.text}")
        told.exit_code = cause.code
        told.add_note(f"Process {cause.rank}:\n{cause.traceback}")
        return told

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory in the launcher's store."""
        self._board.run.set("run_dir", run_dir)

    def recall_run(self) -> str | None:
        """Return the run directory of an earlier attempt."""
        run = self._board.run
        return run.get("run_dir").decode() if run.check(["run_dir"]) else None
