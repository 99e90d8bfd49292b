"""Jobs on this machine: each a process of `train`, with its share of the cores and devices."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from scripts.cli.console import AS_JOB
from scripts.cli.signals import end_with_parent
from scripts.sweeps.leaderboard import Job

TRAIN = "scripts.train"
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
_PATIENCE = 0.05  # seconds between two looks at the processes

Ended = list[tuple[Job, int]]  # jobs and the codes of their processes; -N: killed by signal N


def start_process(
    module: str,
    argv: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    shown: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `train` in a group of its own; it saves and ends when this process dies.

    It prints into a file, or with `shown` its errors only. `folder`: its working directory.
    """
    file: IO[bytes]
    try:
        output.parent.mkdir(exist_ok=True)
        file = output.open("ab")
    except OSError:  # a full disk: the job reports it for its own files
        file = open(os.devnull, "ab")  # noqa: SIM115
    with file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *argv],
            cwd=folder,
            env={**os.environ, **(environment or {}), **AS_JOB},
            stdin=subprocess.DEVNULL,
            stdout=None if shown else file,
            stderr=file,
            process_group=0,  # a Ctrl-C of the terminal is forwarded once, by the sweep
            preexec_fn=_prepare,
        )


def _prepare() -> None:
    end_with_parent(signal.SIGTERM)
    # SLURM sends submitit's signal to every process: the one beside the job forwards another.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class LocalLauncher:
    """Run up to `jobs` jobs side by side; a single one has the terminal and the whole machine.

    `devices`: how many accelerators there are; a job has some of its own, or shares them with
    `per_device` others. `quiet`: what jobs print goes to their files alone.
    """

    def __init__(self, jobs: int, per_device: int, devices: int) -> None:
        self.quiet = jobs > 1
        self._jobs, self._per_device = jobs, per_device
        self._names = device_names(devices, os.environ.get(VISIBLE)) if self.quiet else []
        self._running: dict[int, tuple[Job, list[str], subprocess.Popen[bytes]]] = {}
        self._shown = 0  # bytes of the errors of the job that has the terminal

    def describe(self) -> str:
        """Describe how many jobs run at the same time, and on which resources."""
        threads = share_of_threads(self._jobs).get(THREADS) or os.environ.get(THREADS, "all")
        said = f"up to {self._jobs} jobs at a time, {threads} thread{'s' * (threads != '1')} each"
        count = len(self._names)
        on = f", on {count} device{'s' * (count > 1)} (sweep.jobs_per_device={self._per_device})"
        return said + (on if count else "")

    def start(self, job: Job, argv: Sequence[str]) -> bool:
        """Start a job and return at once; return False if there is no room for it now."""
        strategy = job.config.get("strategy") or {}
        devices = self.free_devices(strategy)
        if devices is None:
            return False
        # The processes of a job share its threads.
        environment = share_of_threads(self._jobs, processes_of(strategy))
        if devices:
            environment[VISIBLE] = ",".join(devices)
        self._shown = job.output.stat().st_size if job.output.exists() else 0
        process = start_process(TRAIN, argv, job.output, environment, shown=not self.quiet)
        self._running[job.number] = job, devices, process
        return True

    def free_devices(self, strategy: Mapping[str, Any]) -> list[str] | None:
        """Return the devices for a job of a strategy; None if there is no room now."""
        if len(self._running) >= self._jobs:
            return None
        if not self._names or strategy.get("accelerator") == "cpu":
            return []
        used = Counter(name for _, names, _ in self._running.values() for name in names)
        free = sorted((n for n in self._names if used[n] < self._per_device), key=used.__getitem__)
        wanted = min(processes_of(strategy), len(self._names))
        return free[:wanted] if len(free) >= wanted else None

    def wait(self, seconds: float) -> Ended:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            found = [(job, process.poll()) for job, _, process in self._running.values()]
            ended = [(job, code) for job, code in found if code is not None]
            if not self.quiet:
                self._pass_on()
            if ended or time.monotonic() > deadline:
                break
            time.sleep(_PATIENCE)
        for job, _ in ended:
            del self._running[job.number]
        return ended

    def send(self, number: int) -> None:
        """Send a signal to all running jobs; as from a terminal, Ctrl-C goes to all processes."""
        for *_, process in self._running.values():
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)

    def close(self) -> None:
        """Do nothing: there is no resource to release."""

    def _pass_on(self) -> None:
        for job, *_ in self._running.values():
            with suppress(OSError), job.output.open("rb") as file:
                file.seek(self._shown)
                said = file.read()
                self._shown += len(said)
                sys.stderr.write(said.decode(errors="replace"))
                sys.stderr.flush()


def share_of_threads(jobs: int, processes: int = 1) -> dict[str, str]:
    """Return the environment that gives each of several jobs its share of the CPUs.

    A number that the user has set is kept; a job that runs alone has the threads of any run.
    """
    if os.environ.get(THREADS) is not None or jobs == 1:
        return {}
    return {THREADS: str(max(1, usable_cpus() // jobs // processes))}


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def processes_of(strategy: Mapping[str, Any]) -> int:
    """Return how many devices, or processes, a job asks for; 1 for `auto`."""
    devices = strategy.get("devices", 1)
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) else 1


def device_names(count: int, visible: str | None) -> list[str]:
    """Return the names of `count` devices, as CUDA_VISIBLE_DEVICES spells them."""
    shown = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return shown[:count] if shown else [str(number) for number in range(count)]
