"""Checks of the machine's resources, before any process is started."""

from __future__ import annotations

import os

import torch

from trainer.errors import ResourceError

# Unshared memory in bytes, on Linux, of a process that has imported torch and built a small model,
# and of a forked worker that has loaded a batch.
_PROCESS, _WORKER = 300 * 2**20, 50 * 2**20


def check_processes(processes: int, accelerator: str = "auto", backend: str = "auto") -> None:
    """Raise ResourceError if the machine lacks the memory or the GPUs for these processes."""
    on_gpus = accelerator in ("auto", "cuda") and torch.cuda.is_available()
    if backend == "nccl" and not on_gpus:
        raise ResourceError(
            "strategy.backend=nccl needs GPUs, and this run has none: set "
            "strategy.backend=gloo, or auto"
        )
    if on_gpus and processes > torch.cuda.device_count():
        raise ResourceError(
            f"strategy.devices={processes}: this machine has {torch.cuda.device_count()} GPUs; "
            "strategy.accelerator=cpu trains on the CPU"
        )
    _check("strategy.devices", "processes", processes, processes, _PROCESS)


def check_workers(workers: int) -> None:
    """Raise ResourceError if the machine lacks the memory for the workers of one loader."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _check("loader.num_workers", "workers", workers, workers * ranks, _WORKER)


def _check(key: str, kind: str, value: int, count: int, each: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if count > max(8, memory // each):
        raise ResourceError(
            f"{key}={value}: {count} {kind} need at least {count * each / 2**30:.0f} GiB, and "
            f"this machine has {memory / 2**30:.0f} GiB and {os.cpu_count()} cores: lower {key}"
        )
