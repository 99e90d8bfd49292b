"""Jobs on this machine: separate processes, forked from one that has imported torch."""

import os

from scripts.cli.job import AS_JOB
from scripts.sweeps.launchers.launcher import TRAIN, Ended, Launch, errors_of
from scripts.sweeps.launchers.server import Server
from scripts.sweeps.launchers.slots import (
    THREADS,
    VISIBLE,
    Slots,
    device_names,
    processes_of,
    share_of_threads,
)


class LocalLauncher:
    """Run up to `jobs` jobs side by side; a single one has the terminal and the whole machine."""

    def __init__(self, server: Server, jobs: int, per_device: int) -> None:
        self.quiet = jobs > 1
        self._server = server
        self._jobs = jobs
        self._per_device = per_device
        self._slots: Slots | None = None
        self._launched: dict[
            int, tuple[Launch, int]
        ] = {}  # and the length of its output before this start
        self._share: dict[str, str] = share_of_threads(jobs, os.environ.get(THREADS))

    def describe(self) -> str:
        """Describe how many jobs run at the same time, and on which resources."""
        slots = self._ready()
        threads = self._share.get(THREADS) or os.environ.get(THREADS, "all")
        said = f"up to {self._jobs} jobs at a time, {threads} thread{'s' * (threads != '1')} each"
        if not slots.names:
            return said
        devices = f"{len(slots.names)} devices" if len(slots.names) > 1 else "1 device"
        return f"{said}, on {devices} (sweep.jobs_per_device={self._per_device})"

    def start(self, launch: Launch) -> bool:
        """Start a job and return at once; return False if there is no room for it now."""
        devices = self._ready().take(launch.number, launch.strategy)
        if devices is None:
            return False
        output = launch.output if self.quiet else None
        length = launch.output.stat().st_size if launch.output.exists() else 0
        environment = self._environment(launch, devices)
        self._launched[launch.number] = launch, length
        call = f"{TRAIN}:main"
        self._server.start(launch.number, call, launch.argv, environment, output, composed=True)
        return True

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`."""
        ended = self._server.wait(seconds)
        return [self._note(end) for end in ended]

    def send(self, number: int) -> None:
        """Send a signal to all running jobs."""
        self._server.send(number)

    def close(self) -> None:
        """Close the server."""
        self._server.close()

    def _ready(self) -> Slots:
        if self._slots is None:
            self._server.environment.update(self._share)
            self._server.ready()
            names = device_names(self._server.devices, os.environ.get(VISIBLE))
            self._slots = Slots(self._jobs, names if self.quiet else [], self._per_device)
        return self._slots

    def _environment(self, launch: Launch, devices: list[str]) -> dict[str, str]:
        environment = {**AS_JOB, **({VISIBLE: ",".join(devices)} if devices else {})}
        processes = processes_of(launch.strategy)
        if THREADS in self._share and processes > 1:  # the processes of a job share its threads
            environment[THREADS] = str(max(1, int(self._share[THREADS]) // processes))
        return environment

    def _note(self, end: Ended) -> Ended:
        assert self._slots is not None
        self._slots.give_back(end.number)
        launch, length = self._launched.pop(end.number)
        if not self.quiet:
            return end
        return Ended(end.number, end.code, errors_of(launch.output, length))
