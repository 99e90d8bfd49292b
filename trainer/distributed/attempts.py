"""The number of this attempt of a run, where a launcher restarts lost processes."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer.errors import SilentPeerError

_KEY = "TORCHELASTIC_RESTART_COUNT"
_PREFIX = "regimen/attempts"
_PAUSE = 0.02  # seconds between two polls of the store


def attempt() -> str:
    """Return the number of this attempt; "0" for the first and without a launcher."""
    return os.environ.get(_KEY, "0")


def settle(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make the processes of several nodes use the same attempt number.

    The launcher of a node counts only the restarts that its own processes caused, so the launchers
    of several nodes pass different numbers to their processes.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        os.environ[_KEY] = agree(store, rank, world_size, timeout)


def agree(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a number that is shared by all processes of this attempt and by no other attempt."""
    calls = PrefixStore(_PREFIX, store)
    try:
        if rank:
            return _follow(calls, rank)
        return _lead(calls, range(1, world_size), time.monotonic() + timeout.total_seconds())
    except (dist.DistStoreError, TimeoutError) as error:
        raise SilentPeerError.after(timeout.total_seconds()) from error


def _follow(store: Store, rank: int) -> str:
    name = uuid.uuid4().hex
    store.set(f"here/{rank}", name)
    number = store.get(f"number/{name}").decode()
    store.set(f"heard/{number}/{name}", "")
    return number


def _lead(store: Store, others: range, deadline: float) -> str:
    """Count one more attempt, and publish its number until each process has acknowledged it.

    The store may still name a process of an earlier attempt. That process never acknowledges, but
    its replacement registers itself soon.
    """
    number = str(store.add("count", 1) - 1)
    while time.monotonic() < deadline:
        names = [name.decode() for name in store.multi_get([f"here/{r}" for r in others])]
        for name in names:
            store.set(f"number/{name}", number)
        if store.check([f"heard/{number}/{name}" for name in names]):
            return number
        time.sleep(_PAUSE)
    raise TimeoutError
