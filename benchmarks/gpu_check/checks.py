"""What a step finds: checks, figures and tables of a profiler, written as soon as it is known."""

import json
import os
import platform
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision

from regimen.trainer.device import default_device, empty_caches, product_name

SIMULATED = os.environ.get("SIMULATED") == "1"
DEVICE = default_device()
ON_CUDA = DEVICE.type == "cuda"
_ROWS = 40  # of a profiler's table


class Checks:
    """The JSON of a step, written anew with each check: a time limit loses nothing before it.

    folder: the step's own, for what it writes beside that; it is removed afterwards.
    """

    def __init__(self, step: str, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "step.json"
        self._content: dict[str, Any] = {"step": step, "machine": machine()}
        self._content |= {"simulated": SIMULATED, "checks": [], "figures": {}}
        self._write()

    def add(self, what: str, expected: str, seen: Any, ok: bool) -> None:
        """Note a check: what was looked at, what was expected, what was seen, whether it is so."""
        check = {"what": what, "expected": expected, "seen": str(seen), "ok": bool(ok)}
        self._content["checks"].append(check)
        print(f"{'ok' if ok else 'NOT OK'}: {what}: expected {expected}, seen {seen}", flush=True)
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Note a figure that nothing is expected of."""
        self._content["figures"][name] = value
        print(f"{name}: {value}", flush=True)
        self._write()

    def table(self, title: str, profile: Any) -> None:
        """Keep the table of a profiler."""
        by = "self_device_time_total" if ON_CUDA else "self_cpu_time_total"
        text = profile.key_averages().table(sort_by=by, row_limit=_ROWS)
        with (self.folder / "profiles.txt").open("a", encoding="utf-8") as file:
            file.write(f"{title}\n{text}\n\n")

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Run a part of the step; its failure is a check that is not ok, and ends no other."""
        try:
            yield
        except Exception as error:  # such as too little memory
            traceback.print_exc()
            said = str(error).strip() or "without a message"
            self.add(what, "no error", f"{type(error).__name__}: {said.splitlines()[0]}", False)
        finally:
            empty_caches()

    def _write(self) -> None:
        # Whole or absent: the step may be killed at any moment.
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._content, indent=1), encoding="utf-8")
        temporary.replace(self._path)


def machine() -> dict[str, Any]:
    """Return what a figure depends on beside the code: card, driver, versions, processor."""
    facts: dict[str, Any] = {"card": product_name(DEVICE), "driver": _driver()}
    facts |= {"python": platform.python_version(), "torch": str(torch.__version__)}
    facts |= {"torchvision": str(torchvision.__version__), "cuda": torch.version.cuda}
    facts |= {"cudnn": _cudnn() if ON_CUDA else None}
    facts |= {"processor": _processor(), "cores": os.cpu_count()}
    if ON_CUDA:
        properties = torch.cuda.get_device_properties(DEVICE)
        facts |= {"capability": f"{properties.major}.{properties.minor}"}
        facts |= {"memory_gib": round(properties.total_memory / 2**30, 1)}
    return facts


def _cudnn() -> Any:
    find: Any = torch.backends.cudnn.version
    return find()


def _driver() -> str:
    """Return the version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if not ON_CUDA:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
