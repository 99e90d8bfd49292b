"""The process group of a run: rendezvous, collectives, agreement on a stop, failures.

A single process is a group, too, whose collectives return their own input.
"""

import _thread
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
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

STORE = "REGIMEN_STORE"  # names the file that is the store of the processes of our launcher
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_CONNECT_TIMEOUT = timedelta(seconds=10)
_POLL_INTERVAL = 0.02  # seconds between two looks into the store
_GRACE_PERIOD = 5.0  # seconds that a process has to stop after another one has failed
# The timeout of GPU collectives exceeds strategy.timeout by this much. NCCL's watchdog kills the
# process that waits, which is not the cause: the collective of the hosts, whose error names the
# cause, must time out first.
_WATCHDOG_DELAY = timedelta(seconds=60)
# Parts of the errors that torch's process groups raise when a peer is gone, in any call.
_LOST = re.compile(
    "connection (closed by peer|reset by peer|refused)|broken pipe|gloo/transport"
    "|nccl communicator was aborted|remote process exited"
)
_SILENT = re.compile("timed out (waiting|after)|watchdog caught collective operation timeout")


class ErrorStore:
    """The first failure of an attempt, in the store of the process group.

    The store lives as long as the process that hosts it. `run`: keys that outlive an attempt.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.run = PrefixStore("regimen/run", store)
        self._attempt = PrefixStore(f"regimen/attempt-{attempt()}", store)
        self._rank = rank

    def report(self, error: BaseException) -> bool:
        """Return whether this process is the first to fail; the others then report its `error`."""
        code = getattr(error, "exit_code", 1)
        text = str(error) if code != 1 else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        own = json.dumps((self._rank, code, text, trace))
        try:
            first = json.loads(self._attempt.compare_set("cause", "", own))
            return bool(first[0] == self._rank)
        except (RuntimeError, ValueError):  # the process that hosts the store is gone
            return True

    def nearest(self, cause: tuple[int, str], processes: int) -> str:
        """Return the message of the smallest distance, of those that all processes call this with.

        It is no collective: processes that do not call it may wait in one of their own. Then, after
        a while, the message of this process is returned.
        """
        causes: list[Any] = [cause]
        keys = [f"cause/{rank}" for rank in range(processes)]
        with suppress(RuntimeError):  # not all are there, or the process that hosts the store left
            self._attempt.set(keys[self._rank], json.dumps(cause))
            self._attempt.wait(keys, timedelta(seconds=_GRACE_PERIOD))
            causes = [json.loads(self._attempt.get(key)) for key in keys]
        return str(min(causes)[1])

    def failure(self) -> PeerError | None:
        """Return the failure of another process; None if none has reported one."""
        with suppress(RuntimeError, ValueError):  # the process that hosts the store is gone
            if self._attempt.check(["cause"]):
                rank, code, text, trace = json.loads(self._attempt.get("cause"))
                if rank != self._rank:
                    error = PeerError(f"process {rank} failed: {text}")
                    error.exit_code = code
                    error.add_note(f"Process {rank}:\n{trace}")
                    return error
        return None


def is_first_to_fail(error: BaseException) -> bool:
    """Report `error`; return whether no other process of this one's launcher failed before."""
    try:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT)
    except (RuntimeError, KeyError, ValueError):
        return True
    return ErrorStore(store, int(os.environ["RANK"])).report(error)


def launcher_store(timeout: timedelta) -> Store:
    """Return the store of this process's launcher: a file of ours, or the server of torchrun.

    A server would listen on every interface, and its store lists its keys to whoever asks.
    """
    store: Store
    if STORE in os.environ:
        # Without the number of processes no process removes the file, which a restart needs.
        store = FileStore(os.environ[STORE])
        store.set_timeout(timeout)
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def use_loopback_interface() -> None:
    """Let gloo and NCCL listen on the loopback interface only.

    They would take the interface of the host's name, and unpickle what arrives there. Interfaces
    that a cluster's environment names are meant for several machines.
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
    registers itself soon. Waits for all processes; raises SilentPeerError after `timeout`.
    """
    keys = PrefixStore("regimen/attempts", store)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if rank:
            name = uuid.uuid4().hex
            keys.set(f"here/{rank}", name)
            number = keys.get(f"number/{name}").decode()
            keys.set(f"heard/{number}/{name}", "")
            return number
        number = str(keys.add("count", 1) - 1)
        while time.monotonic() < deadline:
            registered = keys.multi_get([f"here/{other}" for other in range(1, world_size)])
            names = [name.decode() for name in registered]
            for name in names:
                keys.set(f"number/{name}", number)
            if keys.check([f"heard/{number}/{name}" for name in names]):
                return number
            time.sleep(_POLL_INTERVAL)
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
        environment: Mapping[str, str] = os.environ if backend else {}
        self.rank = int(environment.get("RANK", 0))
        self.local_rank = int(environment.get("LOCAL_RANK", self.rank))  # on this machine
        self.world_size = int(environment.get("WORLD_SIZE", 1))
        self.backend = backend
        self.timeout = timedelta(seconds=timeout)
        self._device_timeout = self.timeout
        # Neighbours that compute on the same samples, each a part of a layer.
        self.tensor_size = 1
        # The group of one process of each set of such neighbours; None: all processes.
        self.data: dist.ProcessGroup | None = None
        # Gloo group for host-side messages, whatever the device backend; None in a single process.
        self.control: dist.ProcessGroup | None = None
        self._devices_only = False  # whether `data` exchanges no tensors of hosts
        # Explains an error of the strategy's wrapper in the user's words; set by the strategy.
        self.translate_error: Callable[[Exception], Exception | None] = lambda _: None
        self._errors: ErrorStore | None = None
        self._failed = False
        self._previous_count: Callable[[], int] | None = None  # of the last `agree_on_stop`

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
        """Join the process group; a collective.

        `device` is the device that this process computes on. Keys of an attempt before a restart
        are not seen.
        """
        if self.backend is None:
            return
        if os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size):
            use_loopback_interface()
        store = launcher_store(self.timeout)
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            # Each node's launcher counts its own restarts: all wait for a common number.
            os.environ[_ATTEMPT] = agreed_attempt(store, self.rank, self.world_size, self.timeout)
        self._errors = ErrorStore(store, self.rank)
        queued = is_async(device)  # collectives are: the host goes on
        self._devices_only = queued and not self.backend.startswith("cpu:")
        if queued:
            self._device_timeout = self.timeout + _WATCHDOG_DELAY
            # By default NCCL's watchdog ends the process that waits by SIGABRT, and nothing names
            # the cause. With aborted communicators its next collective raises: `_as_peer_error`.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"regimen/group-{attempt()}", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._device_timeout,
            device_id=device if queued else None,
        )
        if self.tensor_size > 1:
            self.data, _ = self.along((self.data_size, self.tensor_size))
        # A group of its own, so that communication between hosts never waits for a device.
        # torch asks it for a backend of the device, too, and knows of few that gloo serves.
        backend = f"cpu:gloo,{device.type}:gloo" if queued else "gloo"
        self.control = dist.new_group(backend=backend, timeout=self.timeout)  # type: ignore[assignment]

    def along(self, shape: Sequence[int]) -> list[dist.ProcessGroup]:
        """Return, for each dimension of a grid of all processes, the group through this one.

        A collective.
        """
        grid = torch.arange(self.world_size).view(*shape)
        groups = []
        for dimension, size in enumerate(shape):
            # A tensor on the host: nothing waits.
            lines = grid.movedim(dimension, -1).reshape(-1, size).tolist()
            # A DeviceMesh would make the groups with torch's timeout instead of the run's.
            make_groups: Any = dist.new_subgroups_by_enumeration
            group, _ = make_groups(lines, timeout=self._device_timeout)
            groups.append(group)
        return groups

    def _barrier(self) -> None:
        """Wait for all processes; a collective of the hosts."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Destroy the group, after a barrier so that no process still waits in a collective.

        After a failure there is no barrier: the process exits and its connections close.
        """
        if self.control is not None and not self._failed:
            self._barrier()
            dist.destroy_process_group()

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes; a collective.

        Of processes with the same samples (a tensor group) one counts.
        """
        if self.control is None:
            return tensor
        total = tensor.clone()
        is_on_host = total.device.type == "cpu"
        if not (is_on_host and self._devices_only):
            dist.all_reduce(total, group=self.data)  # one process of each tensor group
            return total
        # The backend of `data` knows no host tensors. `control` does, and holds all processes: each
        # sample is added once for each process of a tensor group.
        dist.all_reduce(total, group=self.control)
        if self.tensor_size > 1:
            total = total / self.tensor_size
        return total

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value; a collective of the hosts."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank; a collective of the hosts."""
        values = [value] * self.world_size
        if self.control is not None:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_data(self, value: Any) -> list[Any]:
        """Return the value of each share of the samples, by `data_rank`; a collective."""
        return self.gather(value)[:: self.tensor_size]

    def run_on_main(self, write: Callable[[], object]) -> None:
        """Call `write` on the main process; a StorageError there is raised on all processes.

        A collective: the other processes wait for the main one.
        """
        failure = None
        if self.is_main:
            try:
                write()
            except StorageError as error:
                failure = str(error)
        failure = self.broadcast(failure)
        if failure is not None:
            raise StorageError(failure)

    def nearest_cause(self, cause: tuple[int, str]) -> str:
        """Return the message of the smallest distance among the processes that fail with this one.

        `cause`: the distance from the origin, and the message. Processes may decide alone whether
        they fail: those that do not are not waited for.
        """
        if self._errors is None:
            return cause[1]
        return self._errors.nearest(cause, self.world_size)

    def agree_on_stop(self, state: TrainState, at_once: bool = True) -> None:
        """Stop all processes after the same update if any of them requests it, by setting `state`.

        A collective of the hosts: all processes pass the same arguments. Without `at_once` the
        request of a single process may take effect one call later.

        Each call starts to count the requests and reads the count of the previous call, so that the
        communication overlaps with the next update. A process with a request waits for the count of
        this call. If all processes request a stop (early stopping), all see it and stop at this
        update, as a single process would; otherwise all see it at their next call.
        """
        if self.control is None:
            state.apply_stop()
            return
        request = state.stop_request  # read once: a signal may come at any moment
        previous_count = self._previous_count
        count = self._start_count(request is not None)
        self._previous_count = count

        agreed = previous_count is not None and previous_count() > 0
        if not agreed and at_once:
            agreed = count() > 0
        elif not agreed and request is not None:
            agreed = count() == self.world_size
        if not agreed:
            return
        # Once in a run: the stop is decided, and each process has to know the same reason for it.
        requests = [other for other in self.gather(request) if other is not None]
        self._previous_count = None  # its requests are handled here
        if requests:  # a signal takes precedence, then the lowest rank
            state.stop(*max(requests, key=lambda other: int(other[1])))

    def _start_count(self, requested: bool) -> Callable[[], int]:
        """Start to count the processes with a request; what is returned waits for the number."""
        total = torch.tensor(int(requested))
        work = dist.all_reduce(total, group=self.control, async_op=True)

        def count() -> int:
            # Waits for the other hosts, not for a device.
            work.wait()
            return int(total)

        return count

    def on_signal(self) -> None:
        """Exit if the signal was sent because another process failed, and this one hangs.

        Called within the signal handler.
        """
        errors = self._errors
        if errors is None:
            return

        def exit_after_failure() -> None:
            timer = threading.Event()
            while not timer.wait(_GRACE_PERIOD):
                if errors.failure() is not None:
                    leave_at_once(PeerError.exit_code)

        # `threading` takes locks that the interrupted code may hold.
        _thread.start_new_thread(exit_after_failure, ())

    @contextmanager
    def one_per_node(self) -> Iterator[None]:
        """Run the context on the first process of each machine before the others (downloads).

        A collective: a barrier, before the context on the others and after it on the first.
        """
        if self.local_rank:
            self._barrier()
        yield
        if not self.local_rank:
            self._barrier()

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Report a failure to the other processes, and raise a failure of theirs as PeerError."""
        try:
            yield
        except Interrupted:  # all processes are interrupted together
            raise
        except Exception as error:
            if self._errors is None:
                raise
            self._failed = True
            for number in EXIT_CODES:  # the launcher stops the others: this one already ends
                signal.signal(number, signal.SIG_IGN)
            cause = self.translate_error(error) or self._as_peer_error(error, self._errors) or error
            self._errors.report(cause)
            if cause is error:
                raise
            raise cause from error

    def _as_peer_error(self, error: Exception, errors: ErrorStore) -> PeerError | None:
        """Return a PeerError if `error` shows that another process is lost, with its failure."""
        if not isinstance(error, RuntimeError):
            return None
        text = str(error).lower()
        if _SILENT.search(text):
            return errors.failure() or SilentPeerError(self.timeout)
        if isinstance(error, dist.DistError) or _LOST.search(text):
            return errors.failure() or PeerError("another process of the run was lost")
        return None

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory in the launcher's store, for the processes after a restart."""
        if self._errors is not None:
            self._errors.run.set("run_dir", run_dir)

    def recall_run(self) -> str | None:
        """Return the run directory of an earlier attempt; None if there is none."""
        if self._errors is None or not self._errors.run.check(["run_dir"]):
            return None
        return self._errors.run.get("run_dir").decode()
