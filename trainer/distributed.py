"""The processes of a run: how they meet, exchange, stop and fail; one is a group, too."""

import _thread
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from regimen.trainer.device import is_async
from regimen.trainer.errors import (
    EXIT_CODES,
    Interrupted,
    PeerError,
    SilentPeerError,
    StorageError,
    leave_at_once,
)
from regimen.trainer.state import TrainState

STORE = "REGIMEN_STORE"  # the path of the file in which the processes of our launcher meet
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
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


class Board:
    """Two keys in the store of the group, which lives as long as the process that hosts it."""

    def __init__(self, store: Store, rank: int) -> None:
        self.run = PrefixStore("regimen/run", store)
        self._attempt = PrefixStore(f"regimen/attempt-{attempt()}", store)
        self._rank = rank

    def claim(self, error: BaseException) -> bool:
        """Return whether this process is the first to fail; the others then report its `error`."""
        code = getattr(error, "exit_code", 1)
        text = str(error) if code != 1 else f"{type(error).__name__}: {error}"
        cause = self._rank, code, text, "".join(traceback.format_exception(error))
        try:
            first = json.loads(self._attempt.compare_set("cause", "", json.dumps(cause)))
            return bool(first[0] == self._rank)
        except (RuntimeError, ValueError):  # the process that hosts the store is gone
            return True

    def failure(self) -> PeerError | None:
        """Return the failure of another process; None if none has reported one."""
        with suppress(RuntimeError, ValueError):  # the process that hosts the store is gone
            if self._attempt.check(["cause"]):
                rank, code, text, where = json.loads(self._attempt.get("cause"))
                if rank != self._rank:
                    told = PeerError(f"process {rank} failed: {text}")
                    told.exit_code = code
                    told.add_note(f"Process {rank}:\n{where}")
                    return told
        return None


def is_first_to_fail(error: BaseException) -> bool:
    """Return whether no other process of this one's launcher has failed; `error` is then known."""
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=_PATIENCE)
    except (RuntimeError, KeyError, ValueError):
        return True
    return Board(store, int(os.environ["RANK"])).claim(error)


def meeting_place(timeout: timedelta) -> Store:
    """Return the store of this process's launcher: a file of ours, or the server of torchrun.

    A server would listen on every interface, and its store lists its keys to whoever asks.
    """
    store: Store
    if STORE in os.environ:
        # Without the number of processes none removes the file: a restart needs what it holds.
        store = FileStore(os.environ[STORE])
        store.set_timeout(timeout)
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def stay_on_this_machine() -> None:
    """Let gloo and NCCL listen on the loopback interface only.

    They would take the interface of the host's name, and unpickle what arrives there. What the
    environment says of a cluster's interfaces is meant for several machines.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    os.environ["NCCL_SOCKET_IFNAME"] = f"={_LOOPBACK}"


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
    raise SilentPeerError(timeout)


def is_rank() -> bool:
    """Return whether a launcher (torchrun or ours) started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Group:
    """The processes that a launcher started, over torch.distributed.

    Without a `backend` it is one process alone, whose collectives return their own input.
    """

    def __init__(self, backend: str | None = None, timeout: float = 1800.0) -> None:
        place: Mapping[str, str] = os.environ if backend else {}
        self.rank = int(place.get("RANK", 0))
        self.local_rank = int(place.get("LOCAL_RANK", self.rank))  # on this machine
        self.world_size = int(place.get("WORLD_SIZE", 1))
        self.tensor_size = 1  # neighbours that compute on the same samples, each a part of a layer
        self.data: dist.ProcessGroup | None = None  # one of each such neighbours; None of all
        self.backend = backend
        self.timeout = self._patience = timedelta(seconds=timeout)
        self.recognize: Callable[[Exception], Exception | None] = lambda _: None  # a strategy's
        # Between hosts, whatever devices use; None of one process alone.
        self.control: dist.ProcessGroup | None = None
        self._devices_only = False  # whether `data` exchanges no tensors of hosts
        self._board: Board | None = None
        self._failed = False
        self._flags: Any = None  # numbers in memory that the processes of a machine share
        self._calls = 0  # of `agree` that raised or lowered a flag
        self._before: Callable[[], int] | None = None  # waits for the count of the previous call

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the samples."""
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        """The number of shares of an update's samples."""
        return self.world_size // self.tensor_size

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which decides, writes and prints."""
        return self.rank == 0

    def join(self, device: torch.device) -> None:
        """Meet the others, without the keys of an attempt before a restart.

        `device` is the device that this process computes on.
        """
        if self.backend is None:
            return
        on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size)
        if on_one_machine:
            stay_on_this_machine()
        store = meeting_place(self.timeout)
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            os.environ[_ATTEMPT] = agreed_attempt(store, self.rank, self.world_size, self.timeout)
        self._board = Board(store, self.rank)
        queued = is_async(device)  # collectives are: the host goes on
        self._devices_only = queued and not self.backend.startswith("cpu:")
        self._patience = self.timeout + _WATCHDOG_LATER if queued else self.timeout
        if queued:
            # By default NCCL's watchdog ends the process that waits by SIGABRT, and nothing names
            # the cause. With aborted communicators its next collective raises: `_told_by_peer`.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"regimen/group-{attempt()}", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._patience,
            device_id=device if queued else None,
        )
        if self.tensor_size > 1:
            self.data, _ = self.along((self.data_size, self.tensor_size))
        # A group of its own, so that communication between hosts never waits for a device.
        # torch asks it for a backend of the device, too, and knows of few that gloo serves.
        backend = f"cpu:gloo,{device.type}:gloo" if queued else "gloo"
        self.control = dist.new_group(backend=backend, timeout=self.timeout)  # type: ignore[assignment]
        # Where work is queued only the device waits for a collective: hosts may be several updates
        # apart.
        if device.type == "cpu" and on_one_machine:
            self._share_flags()

    def along(self, shape: Sequence[int]) -> list[dist.ProcessGroup]:
        """Return, for each dimension of a grid of all processes, the line through this one.

        A collective.
        """
        grid = torch.arange(self.world_size).view(*shape)
        lines = [grid.movedim(i, -1).reshape(-1, size).tolist() for i, size in enumerate(shape)]
        # A mesh would make them with torch's timeout instead of the run's.
        make: Any = dist.new_subgroups_by_enumeration
        return [make(line, timeout=self._patience)[0] for line in lines]

    def _share_flags(self) -> None:
        """Let the processes of this machine share memory, two integers for each, if there is any.

        The flags replace an exchange over gloo, whose threads compete for busy cores: 6% of an
        update of 14 ms.
        """
        path = None
        if self.is_main:
            with suppress(OSError):
                descriptor, path = tempfile.mkstemp(prefix="regimen-", dir=_MEMORY)
                os.close(descriptor)
        if (path := self.broadcast(path)) is None:
            return
        flags = torch.from_file(path, shared=True, size=2 * self.world_size, dtype=torch.int64)
        self._flags = flags.numpy()
        self._meet()
        if self.is_main:
            os.unlink(path)

    def _meet(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Destroy the group, after a barrier so that no process still waits in a collective.

        After a failure there is no barrier: the process exits and its connections close.
        """
        if self.control is not None and not self._failed:
            self._meet()
            dist.destroy_process_group()

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes; of those with the same samples, one counts."""
        if self.control is None:
            return tensor
        tensor = tensor.clone()
        if tensor.device.type == "cpu" and self._devices_only:
            # All processes instead of those of `data`: each neighbour adds the same.
            dist.all_reduce(tensor, group=self.control)
            return tensor / self.tensor_size if self.tensor_size > 1 else tensor
        dist.all_reduce(tensor, group=self.data)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        values = [value] * self.world_size
        if self.control is not None:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_data(self, value: Any) -> list[Any]:
        """Return the value of each share of the samples, by `data_rank`."""
        return self.gather(value)[:: self.tensor_size]

    def run_on_main(self, write: Callable[[], object]) -> None:
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

    def agree_on_stop(self, state: TrainState, at_once: bool = True, in_step: bool = False) -> None:
        """Stop all processes after the same update if any of them requests it, by setting `state`.

        All processes pass the same arguments. Without `at_once` the request of a single process may
        take effect one call later. `in_step`: gradients are exchanged before the next call.

        Each call starts to count the requests and reads the count of the previous call, so that the
        communication overlaps with the next update. A process with a request waits for the count of
        this call. If all processes request a stop (early stopping), all see it and stop at this
        update, as a single process would; otherwise all see it at their next call.
        """
        if self.control is None:
            state.apply_stop()
            return
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

    def _raised(self, flags: Any, call: int) -> int:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while (flags >> 1 != call).any():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out waiting for another process")
            time.sleep(_SHORT_PAUSE)
        return int((flags & 1).sum())

    def on_signal(self) -> None:
        """Exit if the signal was sent because another process failed, and this one hangs.

        Called within the signal handler.
        """
        if (board := self._board) is None:
            return

        def leave_with_the_failed() -> None:
            wait = threading.Event()
            while not wait.wait(_GRACE):
                if board.failure() is not None:
                    leave_at_once(PeerError.exit_code)

        # `threading` takes locks that the interrupted code may hold.
        _thread.start_new_thread(leave_with_the_failed, ())

    @contextmanager
    def one_per_node(self) -> Iterator[None]:
        """Run the context on the first process of each machine before the others (downloads)."""
        if self.local_rank:
            self._meet()
        yield
        if not self.local_rank:
            self._meet()

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Report a failure to the other processes, and raise a failure of theirs as PeerError."""
        try:
            yield
        except Interrupted:  # all processes are interrupted together
            raise
        except Exception as error:
            if self._board is None:
                raise
            self._failed = True
            for number in EXIT_CODES:  # the launcher stops the others: this one already ends
                signal.signal(number, signal.SIG_IGN)
            told = self.recognize(error) or self._told_by_peer(error, self._board) or error
            self._board.claim(told)
            if told is error:
                raise
            raise told from error

    def _told_by_peer(self, error: Exception, board: Board) -> PeerError | None:
        """Return a PeerError if `error` shows that another process is lost, with why if it said."""
        if not isinstance(error, RuntimeError):
            return None
        if _SILENT.search(text := str(error).lower()):
            return board.failure() or SilentPeerError(self.timeout)
        if isinstance(error, dist.DistError) or _LOST.search(text):
            return board.failure() or PeerError("another process of the run was lost")
        return None

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory in the launcher's store, for who continues after a restart."""
        if self._board is not None:
            self._board.run.set("run_dir", run_dir)

    def recall_run(self) -> str | None:
        """Return the run directory of an earlier attempt; None if there is none."""
        if self._board is None or not self._board.run.check(["run_dir"]):
            return None
        return self._board.run.get("run_dir").decode()
