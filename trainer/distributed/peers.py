"""What the processes of a run leave in their store: a failure, and the number of the attempt."""

from __future__ import annotations

import json
import os
import time
import traceback
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer.errors import PeerError, SilentPeerError

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PATIENCE = timedelta(seconds=10)
_PAUSE = 0.02  # seconds between two polls of the store
# Parts of the errors that torch's process groups raise when a peer is gone, in any call.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "gloo/transport",
    "nccl communicator was aborted",
    "remote process exited",
)
_SILENT = ("timed out waiting", "timed out after", "watchdog caught collective operation timeout")


@dataclass(frozen=True, slots=True)
class Cause:
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
        self._run = PrefixStore("regimen/run", store)
        self._attempt = PrefixStore(f"regimen/attempt-{attempt()}", store)
        self._rank = rank

    def claim(self, cause: Cause) -> bool:
        """Return whether this process is the first to fail; all then report its `cause`."""
        try:
            first = self._attempt.compare_set("cause", "", json.dumps(asdict(cause)))
            return bool(json.loads(first)["rank"] == self._rank)
        except (RuntimeError, ValueError):  # the process that hosts the store is gone
            return True

    def cause(self) -> Cause | None:
        """Return why another process failed; None if no other process has reported a failure."""
        try:
            if not self._attempt.check(["cause"]):
                return None
            cause = Cause(**json.loads(self._attempt.get("cause")))
        except (RuntimeError, ValueError):
            return None
        return None if cause.rank == self._rank else cause

    def remember_run(self, run_dir: str) -> None:
        """Store the run directory for later attempts."""
        self._run.set("run_dir", run_dir)

    def recall_run(self) -> str | None:
        """Return the run directory of an earlier attempt; None if there is none."""
        return self._run.get("run_dir").decode() if self._run.check(["run_dir"]) else None


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


def peer_trouble(error: BaseException, timeout: timedelta) -> PeerError | None:
    """Return a PeerError if an exception shows that another process is lost, else None."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).lower()
    if any(sign in text for sign in _SILENT):
        return SilentPeerError.after(timeout.total_seconds())
    if isinstance(error, dist.DistError) or any(sign in text for sign in _LOST):
        return PeerError("another process of the run was lost")
    return None


def attempt() -> str:
    """Return the number of this attempt; "0" for the first and without a launcher."""
    return os.environ.get(_ATTEMPT, "0")


def settle_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make the processes of several nodes use the same attempt number.

    The launcher of a node counts only the restarts that its own processes caused, so the launchers
    of several nodes pass different numbers to their processes.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        os.environ[_ATTEMPT] = agreed_attempt(store, rank, world_size, timeout)


def agreed_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a number that is shared by all processes of this attempt and by no other attempt.

    The main process counts, and publishes the number until each process has acknowledged it. The
    store may still name a process of an earlier attempt: that one never acknowledges, but its
    replacement registers itself soon.
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
