"""The parts of a machine that torch is not needed for: versions, CPU, memory, files, disk."""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from scripts.checkup.finding import Check, Finding
from trainer.runs.manifest import versions

_MIB, _GIB = 2**20, 2**30
_PYTHON, _TORCH = ((3, 11), (3, 14)), (2, 11)  # as pyproject.toml has them
_SHARED_MEMORY = _GIB  # bytes free
_OPEN_FILES = 1024
_SPACE = 5 * _GIB
_SPEED = 50  # MiB/s
_WRITTEN = 32 * _MIB


def machine_checks(folder: Path) -> dict[str, Check]:
    """Return the checks by name; files are written into `folder` for a moment."""
    return {
        "versions": lambda: of_versions(versions()),
        "threads": lambda: of_threads(_usable_cpus(), os.environ.get("OMP_NUM_THREADS")),
        "shared memory": shared_memory,
        "open files": lambda: of_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "disk space": lambda: of_space(folder, _free(folder)),
        "disk speed": lambda: of_speed(folder, write_speed(folder)),
    }


def of_versions(found: dict[str, str]) -> Finding:
    """Hold the versions of Python and torch against those that are supported."""
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    low, high = _PYTHON
    if not low <= _number(found["python"]) < high:
        return Finding("versions", text, "use Python 3.11, 3.12 or 3.13")
    if _number(found.get("torch", "0.0")) < _TORCH:
        return Finding("versions", text, "pip install 'torch>=2.11'")
    return Finding("versions", text)


def of_threads(cpus: int, wanted: str | None) -> Finding:
    """Hold the number of threads that the environment asks for against the CPUs."""
    text = f"{cpus} CPUs for this process, OMP_NUM_THREADS {wanted or 'not set'}"
    if wanted is not None and not wanted.replace(",", "").isdigit():
        return Finding("threads", text, "set OMP_NUM_THREADS to a number, or unset it")
    if wanted is not None and int(wanted.split(",")[0]) > cpus:
        return Finding("threads", text, f"unset OMP_NUM_THREADS, or set it to at most {cpus}")
    return Finding("threads", text)


def shared_memory(path: str = "/dev/shm") -> Finding:
    """Look at the memory that batches of worker processes travel in."""
    if sys.platform != "linux":
        return Finding("shared memory", f"{sys.platform} has no {path}")
    try:
        facts = os.statvfs(path)
    except OSError as error:
        cure = f"mount a tmpfs at {path}, or set loader.num_workers=0"
        return Finding("shared memory", f"{path}: {error.strerror}", cure)
    return of_shared_memory(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)


def of_shared_memory(free: int, total: int) -> Finding:
    """Hold free and total bytes of shared memory against what batches need."""
    text = f"/dev/shm has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free >= _SHARED_MEMORY:
        return Finding("shared memory", text)
    cure = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm, or loader.num_workers=0"
    return Finding("shared memory", text, cure)


def of_open_files(limit: int) -> Finding:
    """Hold the limit of open files against what workers and their queues need."""
    unlimited = limit == resource.RLIM_INFINITY
    text = f"limit {'none' if unlimited else limit}"
    enough = unlimited or limit >= _OPEN_FILES
    return Finding("open files", text, None if enough else "ulimit -n 4096")


def of_space(folder: Path, free: int) -> Finding:
    """Hold the free bytes against what checkpoints take."""
    text = f"{free / _GIB:.1f} GiB free in {folder}"
    cure = "free some space, `regimen runs clean` for one, or set run_dir on another disk"
    return Finding("disk space", text, None if free >= _SPACE else cure)


def of_speed(folder: Path, speed: float) -> Finding:
    """Hold the speed of a durable write, in MiB/s, against what checkpoints want."""
    text = f"{speed:.0f} MiB/s written and synced in {folder}"
    cure = "set run_dir on a faster disk, or save less often: callbacks.checkpoint.every_n_epochs"
    return Finding("disk speed", text, None if speed >= _SPEED else cure)


def write_speed(folder: Path, size: int = _WRITTEN) -> float:
    """Return how many MiB/s a file of `size` bytes is written and synced with."""
    content = os.urandom(size)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return size / _MIB / max(time.perf_counter() - start, 1e-6)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
