"""Which attempt of a run this is, where a launcher starts lost processes again."""

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
_PAUSE = 0.02  # seconds between two looks at who is there


def attempt() -> str:
    """Return the number of this attempt; "0" for the first and without a launcher."""
    return os.environ.get(_KEY, "0")


def settle(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Have the processes of several nodes number their attempt alike.

    Each node's launcher counts the restarts that its own processes caused, and those that another
    launcher caused it does not: what they hand to their processes differs.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        os.environ[_KEY] = agree(store, rank, world_size, timeout)


def agree(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a number that all processes of this attempt get, and those of no other."""
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
    """Count one more attempt, and tell the others until each has heard it.

    The store may name a process of an attempt before: it never hears this number, and who has
    taken its place will be there.
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
