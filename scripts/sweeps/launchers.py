"""Where jobs run: on this machine, in a SLURM job array through submitit, or on a Ray cluster.

A launcher starts jobs, polls them and forwards signals. Jobs on other machines share nothing but
the folder of the sweep, which must be on a file system that all machines see.
"""

import importlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import IO, Any

from regimen.conf.errors import ConfigError
from regimen.scripts.cli.console import AS_JOB, logger, usable_cpus
from regimen.scripts.cli.signals import end_with_parent
from regimen.scripts.composition.overrides import first_lines, refuse_untyped
from regimen.scripts.sweeps.leaderboard import Job
from regimen.trainer.errors import ResourceError, stopping_signals
from regimen.trainer.files.names import ForeignNameError, path_below
from regimen.trainer.runs.status import holds_run

TRAIN = "regimen.scripts.train"
THREADS = "OMP_NUM_THREADS"
POLL_SECONDS = 0.05  # between two polls of a job
_OPTIONS = "sweep.launcher_options"
# Options that request resources: YAML files may set them, to a number or a word. All others name
# programs, shell lines, files or machines, and must be typed on the command line.
_RESOURCES = re.compile(
    r"(slurm_)?(account|array_parallelism|constraint|exclude|exclusive|gres|job_name|partition|qos"
    r"|time|nodes|n?tasks_per_node|[cg]pus_per_\w+|mem(_\w+)?|num_[cg]pus)"
    r"|cluster|timeout_min|name|memory|accelerator_type"
)


def start_process(
    module: str,
    argv: Sequence[str],
    output: Path,
    environment: Mapping[str, str] = AS_JOB,
    folder: str | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `train` in a process group of its own; it saves and ends when this process dies.

    `output`: the file for what it prints. `environment`: added to that of this process. `folder`:
    its working directory.
    """

    def prepare() -> None:
        end_with_parent(signal.SIGTERM)
        # SLURM sends submitit's signal to every process. This one ignores it: `NodeJob.checkpoint`
        # forwards another.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    with _open_output(output) as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *argv],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            process_group=0,  # a Ctrl-C of the terminal is forwarded once, by the sweep
            preexec_fn=prepare,
        )


def _open_output(output: Path) -> IO[bytes]:
    """Open the file for the output of a job; the null device if it cannot be written."""
    # A link or a pipe that another job has put there is neither followed nor waited for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        output.parent.mkdir(exist_ok=True)
        path = path_below(output.parent.parent, f"{output.parent.name}/{output.name}")
        return open(os.open(path, flags, 0o666), "ab")
    except (OSError, ForeignNameError):  # a full disk: the job reports it for its own files
        return open(os.devnull, "ab")


class Launcher:
    """Base of the launchers."""

    cancelled = False  # whether the jobs of a cluster were told to end

    def close(self) -> None:
        """Release the resources of the launcher: none by default."""

    def exit_code(self, result: Callable[[], Any]) -> int:
        """Return the exit code of a job of a cluster; -N: it was killed by signal N."""
        try:
            return int(result())
        except Exception:  # cancelled, lost with its machine, or out of time or memory for good
            if self.cancelled:
                return -signal.SIGTERM
            return -signal.SIGKILL


class LocalLauncher(Launcher):
    """Run up to `jobs` jobs side by side; a single one has the whole machine.

    `devices`: the environment variable that limits the accelerators of a process, and their names.
    Up to `per_device` jobs share an accelerator.
    """

    def __init__(self, jobs: int, per_device: int, devices: tuple[str, Sequence[str]]) -> None:
        self._jobs = jobs
        self._per_device = per_device
        self._variable, names = devices
        self._devices = names if jobs > 1 else []  # a single job has all of them
        threads = thread_limit(jobs).get(THREADS) or os.environ.get(THREADS, "all")
        self.description = f"jobs at a time: {jobs}; threads of each: {threads}"
        if self._devices:
            self.description += f"; devices: {', '.join(self._devices)}, jobs on each: {per_device}"

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Start a job beside others and return at once; return False if no device is free."""
        strategy = job.config.get("strategy") or {}
        processes = _device_count(strategy)
        environment = dict(AS_JOB)
        job.devices = []
        if self._devices and strategy.get("accelerator") != "cpu":
            free = self._free_devices(running)
            count = min(processes, len(self._devices))
            if len(free) < count:
                return False
            job.devices = free[:count]
            separator = ";" if self._variable == "ONEAPI_DEVICE_SELECTOR" else ","
            environment[self._variable] = separator.join(job.devices)
        environment |= thread_limit(self._jobs, processes)
        job.handle = start_process(TRAIN, argv, job.output, environment)
        return True

    def _free_devices(self, running: Collection[Job]) -> list[str]:
        """Return the devices that have room for a job, those with the fewest jobs first."""
        jobs = Counter(name for job in running for name in job.devices)
        free = [name for name in self._devices if jobs[name] < self._per_device]
        return sorted(free, key=jobs.__getitem__)

    def poll(self, job: Job) -> int | None:
        """Return the exit code of a job, -N: killed by signal N; None: it still runs."""
        exit_code: int | None = job.handle.poll()
        return exit_code

    def send(self, number: int, running: Collection[Job]) -> None:
        """Send a signal to all jobs; as from a terminal, Ctrl-C goes to all processes of each."""
        for job in running:
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    os.killpg(job.handle.pid, number)
                else:
                    job.handle.send_signal(number)


def _device_count(strategy: Mapping[str, Any]) -> int:
    """Return how many devices a job uses, one process each; `auto` counts as one."""
    devices = strategy.get("devices", 1)
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) else 1


def thread_limit(jobs: int, processes: int = 1) -> dict[str, str]:
    """Return the environment that splits the CPUs between `jobs` jobs of some processes each.

    A number that the user has set stays; a job that runs alone has the threads of any run.
    """
    if os.environ.get(THREADS) is not None or jobs == 1:
        return {}
    return {THREADS: str(max(1, len(usable_cpus()) // jobs // processes))}


@dataclass(slots=True)
class NodeJob:
    """A job for a machine that a cluster chooses; calling it returns the exit code of `train`."""

    argv: Sequence[str]
    run_dir: Path
    output: Path
    folder: str  # the working directory of the sweep
    module: str
    process: "subprocess.Popen[bytes] | None" = field(default=None, compare=False)

    @classmethod
    def of(cls, job: Job, argv: Sequence[str]) -> "NodeJob":
        """Return a job with absolute paths, which can be pickled."""
        return cls(list(argv), job.run_dir.absolute(), job.output.absolute(), os.getcwd(), TRAIN)

    def __call__(self) -> int:
        """Run the job; a job that has begun is resumed, whichever machine it ran on before."""
        self.process = start_process(self.module, self.arguments(), self.output, folder=self.folder)
        try:
            # Polled, not waited for: signals are handled in between.
            while self.process.poll() is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # how Ray cancels a task
            self.stop(signal.SIGTERM)
        return self.process.wait()

    def arguments(self) -> list[str]:
        """Return the arguments of `train`."""
        if not holds_run(self.run_dir):
            return list(self.argv)
        words = [word for word in self.argv if not word.startswith("resume=")]
        return [*words, "resume=auto"]

    def stop(self, number: int) -> None:
        """Make the job save and end, and wait for its end."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(number)
        # Not Popen.wait(): it takes a lock that the interrupted code may hold. If that code has
        # waited first, there is no child left.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def checkpoint(self) -> Any:
        """Save before a preemption or the time limit; submitit queues the rest of the job again."""
        from submitit.helpers import DelayedSubmission

        self.stop(signal.SIGUSR1)
        return DelayedSubmission(replace(self, process=None))


def options_of(options: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Return the options of a launcher that are not null. `typed`: the overrides as typed.

    Raises ConfigError for those that only the command line may set.
    """
    options = {name: value for name, value in options.items() if value is not None}
    others = {name: value for name, value in options.items() if not _is_resource(name, value)}
    refuse_untyped(_OPTIONS, others, typed)
    return options


def _is_resource(name: str, value: Any) -> bool:
    """Return whether an option requests resources, by a number or a word."""
    if name == "resources":
        return all(isinstance(amount, int | float) for amount in value.values())
    is_plain = re.fullmatch(r"[\w.,:=*-]*", str(value))
    return bool(is_plain and _RESOURCES.fullmatch(name))


class SubmititLauncher(Launcher):
    """Submit jobs that start together as one array, and poll the state of each."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._cluster = options.pop("cluster", "slurm")
        self._options = options
        self._collected = list[Job]()  # for the next submission
        self._executor: Any = None
        self.description = f"jobs go to {self._cluster} through submitit"
        # Checks the options; invalid ones leave no files behind.
        with tempfile.TemporaryDirectory() as folder:
            self._open_executor(Path(folder))

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Collect a job for the next submission."""
        job.handle = NodeJob.of(job, argv)
        self._collected.append(job)
        return True

    def poll(self, job: Job) -> int | None:
        """Submit the collected jobs; return the exit code of a job, None while it runs."""
        if self._collected:
            self._submit()
        if not job.handle.done():
            return None
        return self.exit_code(job.handle.result)

    def send(self, number: int, running: Collection[Job]) -> None:
        """Cancel all jobs: running ones save and end, the others never start."""
        self.cancelled = True
        for job in running:
            job.handle.cancel(check=False)

    def _submit(self) -> None:
        if self._executor is None:
            sweep = self._collected[0].run_dir.parent
            self._executor = self._open_executor(sweep.absolute() / "submitit")
        with self._executor.batch():  # at its end they are submitted, as one array
            for job in self._collected:
                job.handle = self._executor.submit(job.handle)
        # The id of a job of an array is ARRAY_NUMBER: the array is cancelled as a whole.
        ids = dict[str, None]()
        for job in self._collected:
            ids[str(job.handle.job_id).partition("_")[0]] = None
        self._collected = []
        program = "scancel" if self._cluster == "slurm" else "kill"
        logger.info(
            "they go on even if this process is killed; what cancels them then: %s %s",
            program,
            " ".join(ids),
        )

    def _open_executor(self, folder: Path) -> Any:
        submitit = _import("submitit")
        python = {}
        if self._cluster in ("slurm", "local"):
            python[f"{self._cluster}_python"] = f"{quote(sys.executable)} -P"
        try:
            executor = submitit.AutoExecutor(folder, cluster=self._cluster, **python)
            # A job is one task on one node, which starts its processes itself.
            executor.update_parameters(**self._options, nodes=1, tasks_per_node=1)
        except Exception as error:
            raise ConfigError(
                _OPTIONS, first_lines(error), f"{_OPTIONS}.cluster=local tries it on this machine"
            ) from error
        return executor


class RayLauncher(Launcher):
    """Submit each job to Ray as a task; without an `address` Ray is started on this machine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._address = options.pop("address", None)
        self.description = "jobs go to Ray"
        if self._address:
            self.description += f" at {self._address}"
        self._ray = _import("ray")
        try:
            options["max_retries"] = 0  # `sweep.retries` counts the starts of a job
            remote = self._ray.remote(**options)
            self._run_job = remote(lambda job: job())
        except (ValueError, TypeError) as error:
            raise ConfigError(_OPTIONS, first_lines(error)) from error

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Submit a job to Ray, which starts it when there is room."""
        if not self._ray.is_initialized():
            self._start_ray()
        job.handle = self._run_job.remote(NodeJob.of(job, argv))
        return True

    def poll(self, job: Job) -> int | None:
        """Return the exit code of a job, None while it runs."""
        done, _ = self._ray.wait([job.handle], timeout=0)
        if not done:
            return None
        return self.exit_code(partial(self._ray.get, job.handle))

    def send(self, number: int, running: Collection[Job]) -> None:
        """Cancel all tasks: running jobs save and end, the others never start."""
        self.cancelled = True
        for job in running:
            self._ray.cancel(job.handle)

    def close(self) -> None:
        """Leave Ray, or end the one that was started here."""
        self._ray.shutdown()

    def _start_ray(self) -> None:
        handlers = {number: signal.getsignal(number) for number in stopping_signals()}
        try:
            self._ray.init(
                self._address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # Ray raises many types when it cannot start
            raise ResourceError(f"no Ray was started or reached: {first_lines(error)}") from error
        for number, handler in handlers.items():  # Ray's own would leave at once on SIGTERM
            signal.signal(number, handler)
        # Tasks belong to the process that submits them: Ray kills those of a process that is lost.
        logger.info(
            "they end with this process; what cancels them, and lets them save: kill %s (on %s)",
            os.getpid(),
            socket.gethostname(),
        )


AnyLauncher = LocalLauncher | SubmititLauncher | RayLauncher
CLUSTERS: Mapping[str, type[SubmititLauncher | RayLauncher]] = {
    "submitit": SubmititLauncher,
    "ray": RayLauncher,
}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            "sweep.launcher", f"{name} takes the package {name}: pip install {name}"
        ) from None
