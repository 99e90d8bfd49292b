"""The manifest of a run: code, versions, machine. No environment variable is recorded."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_FRAMEWORKS = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard")
_DISTRIBUTIONS = ("regimen", *_FRAMEWORKS, "numpy", "pillow", "scikit-learn")
_GIT_SECONDS = 10.0


def now() -> str:
    """Return the time in UTC, as in `2026-11-21T12:00:00.000000+00:00`; sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def start_record(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe one start of a run: process, code, versions, machine, and the caller's `facts`."""
    return {
        "started": now(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "code": code_record(Path(__file__).resolve().parents[2]),
        "working_folder": code_record(Path.cwd()),
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **facts,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries without importing them.

    As of the first call: a process imports a library once.
    """
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_record(folder: Path) -> dict[str, Any]:
    """Return `folder`, its git commit and a hash of its uncommitted changes, if there are any.

    The URLs of remotes are not recorded: they can contain access tokens.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"path": str(folder), "commit": None}
    changed = (_git(folder, "status", "--porcelain", "--untracked-files=no") or b"").splitlines()
    difference = _git(folder, "diff", "HEAD") or b""
    return {
        "path": str(folder),
        "commit": commit.decode().strip(),
        "changed_files": [os.fsdecode(line[3:]) for line in changed],
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    # With optional locks `git status` would write to the user's index.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None
