"""How jobs on one machine share its cores and its accelerators."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of_threads(jobs: int, given: str | None) -> dict[str, str]:
    """Return the environment that gives each of several jobs its share of the CPUs.

    A given number is kept; a job that runs alone has the threads of any run.
    """
    if given is not None or jobs == 1:
        return {}
    return {THREADS: str(max(1, usable_cpus() // jobs))}


def processes_of(strategy: Mapping[str, Any]) -> int:
    """Return how many devices, or processes, a job asks for; 1 for `auto`."""
    devices = strategy.get("devices", 1)
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) else 1


@dataclass(slots=True)
class Slots:
    """Room for `jobs` jobs; each has devices of its own, or shares one with `per_device` others."""

    jobs: int
    names: list[str]  # of devices, as CUDA_VISIBLE_DEVICES has them
    per_device: int = 1
    running: dict[int, list[str]] = field(default_factory=dict)  # devices of each job

    def take(self, number: int, strategy: Mapping[str, Any]) -> list[str] | None:
        """Return the devices for a job; None if there is no room now."""
        if len(self.running) >= self.jobs:
            return None
        if not self.names or strategy.get("accelerator") == "cpu":
            self.running[number] = []
            return []
        used = Counter(name for names in self.running.values() for name in names)
        free = sorted((n for n in self.names if used[n] < self.per_device), key=used.__getitem__)
        wanted = min(processes_of(strategy), len(self.names))
        if len(free) < wanted:
            return None
        self.running[number] = free[:wanted]
        return self.running[number]

    def give_back(self, number: int) -> None:
        """Free the devices of a job that has ended."""
        self.running.pop(number, None)


def device_names(count: int, visible: str | None) -> list[str]:
    """Return the names of `count` devices, as CUDA_VISIBLE_DEVICES spells them."""
    shown = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return shown[:count] if shown else [str(number) for number in range(count)]
