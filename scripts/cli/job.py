"""A job of a sweep prints less: its folder and its place in the sweep are told by the sweep."""

import os
from collections.abc import Mapping

_NAME = "REGIMEN_SWEEP_JOB"
AS_JOB: Mapping[str, str] = {_NAME: "1"}  # what the environment of a job has


def is_job() -> bool:
    """Return whether this process works for a job of a sweep."""
    return os.environ.get(_NAME) == "1"
