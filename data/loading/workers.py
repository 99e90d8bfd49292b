"""How many worker processes a loader starts."""

import os
from typing import Literal


def workers_of(asked: int | Literal["auto"]) -> int:
    """Return the workers of one loader; auto: a process's share of the cores, at most 8."""
    if asked != "auto":
        return asked
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cores <= 1:
        return 0  # the core computes: a worker would take its time
    return min(cores, 8)
