"""The first line of a command that takes seconds to begin: versions, device, threads.

It is printed before torch is imported, so it names a device only where no other can be meant.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from scripts.cli.job import is_job

_TOPOLOGY = Path("/sys/devices/system/cpu")
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")


def greet(asked: str = "auto") -> None:
    """Print versions, device and threads to stderr; not in jobs of a sweep, nor on other ranks.

    `asked`: the kind of device that the command line asks for.
    """
    if is_job() or os.environ.get("RANK", "0") != "0":
        return
    count = threads()
    computing = f"{count} thread{'s' * (count != 1)}"
    if (device := known_device(asked)) is not None:
        computing = f"{device}, {computing}"
    facts = [f"{name} {metadata.version(name)}" for name in ("regimen", "torch")]
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    dot = "·" if encoding.lower().startswith("utf") else "-"
    print(*facts, computing, sep=f" {dot} ", file=sys.stderr, flush=True)


def asked_device(overrides: Sequence[str], key: str = "strategy.accelerator") -> str:
    """Return the kind of device that a command line names; auto where it names none."""
    given = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith(f"{key}=")]
    return given[-1].partition(":")[0] if given else "auto"


def known_device(asked: str = "auto") -> str | None:
    """Return the kind of device that will compute; None where torch has to look."""
    if asked in ("cpu", "cuda", "mps"):
        return asked
    return None if _may_have_accelerator() else "cpu"


def threads() -> int:
    """Return how many threads an operation of torch will use, by its own default on this CPU."""
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):  # torch asks MKL first
        given = os.environ.get(name, "").partition(",")[0]
        if given.isdigit() and int(given):
            return int(given)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    return len({_core(cpu) for cpu in usable})  # MKL counts cores, not hyper-threads


def _core(cpu: int) -> tuple[str, str]:
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        package, core = folder / "physical_package_id", folder / "core_id"
        return package.read_text().strip(), core.read_text().strip()
    except OSError:
        return "", str(cpu)


def _may_have_accelerator() -> bool:
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    if sys.platform != "linux":
        return True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = any(Path(path).exists() for path in _DRIVERS)
    return driver and not hidden and _is_built_for_gpus()


def _is_built_for_gpus() -> bool:
    """Read what torch was built for from a file of its own: its import takes seconds."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return True
    built = re.findall(r"^(?:cuda|hip)\b[^=]*= *(\S+)", text, re.MULTILINE)
    return any(value != "None" for value in built) or not built
