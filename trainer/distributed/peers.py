"""Exchange of the cause of a failure: which process failed first, and why."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer.distributed.attempts import attempt
from trainer.errors import PeerError, SilentPeerError

_PATIENCE = timedelta(seconds=10)
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
    """A few keys in the store of the group, which lives as long as the process that hosts it."""

    def __init__(self, store: Store, rank: int) -> None:
        self._run = PrefixStore("regimen/run", store)
        self._attempt = PrefixStore(f"regimen/attempt-{attempt()}", store)
        self._rank = rank

    def claim(self, cause: Cause) -> bool:
        """Return whether this process is the first to fail; all then report its `cause`."""
        try:
            self._attempt.set(f"cause/{self._rank}", json.dumps(asdict(cause)))
            first = self._attempt.compare_set("first", "", str(self._rank))
        except (RuntimeError, ValueError):  # the process that hosts the store is gone
            return True
        return bool(first.decode() == str(self._rank))

    def cause(self) -> Cause | None:
        """Return why another process failed; None if no other process has reported a failure."""
        try:
            if not self._attempt.check(["first"]):
                return None
            first = self._attempt.get("first").decode()
            cause = Cause(**json.loads(self._attempt.get(f"cause/{first}")))
        except (RuntimeError, ValueError):
            return None
        return None if cause.rank == self._rank else cause

    def remember(self, key: str, value: str) -> None:
        """Store a value for later attempts."""
        self._run.set(key, value)

    def recall(self, key: str) -> str | None:
        """Return a value stored by an earlier attempt; None if there is none."""
        return self._run.get(key).decode() if self._run.check([key]) else None


def agent_board() -> Board | None:
    """Connect to the store of the launcher that started this process; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_PATIENCE,
        )
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
