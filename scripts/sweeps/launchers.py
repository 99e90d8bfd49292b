"""Where jobs run: on this machine, in a SLURM job array through submitit, or on a Ray cluster.

A launcher starts a job, looks whether it has ended and passes signals on. Jobs on other machines
share the folder of the sweep only; it must be on a file system that all machines see.
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
PATIENCE = 0.05  # seconds between two looks at a job
_OPTIONS = "sweep.launcher_options"
# Options that ask for resources: files may set them, to a number or a word. The others name
# programs, shell lines, files or machines.
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
    """Start `train` in a group of its own; it saves and ends when this process dies.

    It prints into the file `output`. `folder`: its working directory.
    """

    def prepare() -> None:
        end_with_parent(signal.SIGTERM)
        # SLURM sends submitit's signal to every process: the one beside the job forwards another.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    file: IO[bytes]
    try:
        output.parent.mkdir(exist_ok=True)
        path = path_below(output.parent.parent, f"{output.parent.name}/{output.name}")
        # What another job has put there, a link or a pipe, is neither followed nor waited for.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        file = open(os.open(path, flags, 0o666), "ab")  # noqa: SIM115
    except (OSError, ForeignNameError):  # a full disk: the job reports it for its own files
        file = open(os.devnull, "ab")  # noqa: SIM115
    with file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *argv],
            cwd=folder,
            env={**os.environ, **environment, **AS_JOB},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            process_group=0,  # a Ctrl-C of the terminal is forwarded once, by the sweep
            preexec_fn=prepare,
        )


class Launcher:
    """What jobs are started by; what they print goes to their files."""

    cancelled = False  # whether the jobs were asked to end

    def close(self) -> None:
        """Release what the launcher holds: nothing, as a rule."""

    def code_of(self, result: Callable[[], Any]) -> int:
        """Return the code that a job of a cluster has ended with, -N: killed by signal N."""
        try:
            return int(result())
        except Exception:  # cancelled, lost with its machine, or out of time or memory for good
            return -(signal.SIGTERM if self.cancelled else signal.SIGKILL)


class LocalLauncher(Launcher):
    """Run up to `jobs` jobs side by side; a single one has the whole machine.

    `devices`: the accelerators, and the environment variable that names those which a job sees: it
    has some of its own, or shares them with `per_device` others.
    """

    def __init__(self, jobs: int, per_device: int, devices: tuple[str, Sequence[str]]) -> None:
        self._jobs, self._per_device = jobs, per_device
        self._variable, names = devices
        self._names = names if jobs > 1 else []
        threads = share_of_threads(jobs).get(THREADS) or os.environ.get(THREADS, "all")
        self.description = f"jobs at a time: {jobs}; threads of each: {threads}"
        if self._names:
            self.description += f"; devices: {', '.join(self._names)}, jobs on each: {per_device}"

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Start a job beside others and return at once; return False if there is no device now."""
        strategy, environment = job.config.get("strategy") or {}, dict[str, str]()
        given = strategy.get("devices", 1)  # `auto` is one
        wanted = len(given) if isinstance(given, list) else given if isinstance(given, int) else 1
        job.devices = []
        if self._names and strategy.get("accelerator") != "cpu":
            used = Counter(name for other in running for name in other.devices)
            room = [name for name in self._names if used[name] < self._per_device]
            free = sorted(room, key=used.__getitem__)
            if len(free) < (count := min(wanted, len(self._names))):
                return False
            job.devices = free[:count]
            between = ";" if self._variable == "ONEAPI_DEVICE_SELECTOR" else ","
            environment[self._variable] = between.join(job.devices)
        environment |= share_of_threads(self._jobs, wanted)  # the processes of a job share them
        job.task = start_process(TRAIN, argv, job.output, environment)
        return True

    def poll(self, job: Job) -> int | None:
        """Return the code that a job has ended with, -N: killed by signal N; None: it runs."""
        code: int | None = job.task.poll()
        return code

    def send(self, number: int, running: Collection[Job]) -> None:
        """Send a signal to all jobs; as from a terminal, Ctrl-C goes to all processes of each."""
        for job in running:
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    os.killpg(job.task.pid, number)
                else:
                    job.task.send_signal(number)


def share_of_threads(jobs: int, processes: int = 1) -> dict[str, str]:
    """Return the environment that gives each of several jobs its share of the CPUs.

    A number that the user has set is kept; a job that runs alone has the threads of any run.
    """
    if os.environ.get(THREADS) is not None or jobs == 1:
        return {}
    return {THREADS: str(max(1, len(usable_cpus()) // jobs // processes))}


@dataclass(slots=True)
class NodeJob:
    """A job on the machine that a cluster has chosen; a call returns the exit code of `train`."""

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
        """Run the job; one that has begun is resumed, on whichever machine it ran before."""
        self.process = start_process(self.module, self.words(), self.output, folder=self.folder)
        try:
            while self.process.poll() is None:  # signals are handled in between
                time.sleep(PATIENCE)
        except KeyboardInterrupt:  # as Ray cancels a task
            self.stop(signal.SIGTERM)
        return self.process.wait()

    def words(self) -> list[str]:
        """Return the arguments of `train`."""
        if not holds_run(self.run_dir):
            return list(self.argv)
        return [*(w for w in self.argv if not w.startswith("resume=")), "resume=auto"]

    def stop(self, number: int) -> None:
        """Make the job save and end, and wait for its end."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(number)
        # Popen.wait() takes a lock that the interrupted code may hold.
        with suppress(ChildProcessError):  # that code was quicker
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def checkpoint(self) -> Any:
        """Save before a preemption or the time limit; submitit queues the rest of the job again."""
        from submitit.helpers import DelayedSubmission

        self.stop(signal.SIGUSR1)
        return DelayedSubmission(replace(self, process=None))


def options_of(options: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Return the options of a launcher that are not null. `typed`: the overrides as given.

    Raises ConfigError for those that only the command line may set.
    """
    given = {name: value for name, value in options.items() if value is not None}
    others = {
        name: value
        for name, value in given.items()
        if not (_RESOURCES.fullmatch(name) and re.fullmatch(r"[\w.,:=*-]*", str(value)))
        and not (name == "resources" and all(isinstance(n, int | float) for n in value.values()))
    }
    refuse_untyped(_OPTIONS, others, typed)
    return given


class SubmititLauncher(Launcher):
    """Submit jobs that start together as one array, and poll the state of each."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._cluster = options.pop("cluster", "slurm")
        self._options = options
        self._new = list[Job]()
        self.description = f"jobs go to {self._cluster} through submitit"
        with tempfile.TemporaryDirectory() as folder:  # invalid options leave no files behind
            self._open(Path(folder))
        self._executor: Any = None

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Keep a job for the next submission."""
        job.task = NodeJob.of(job, argv)
        self._new.append(job)
        return True

    def poll(self, job: Job) -> int | None:
        """Submit the new jobs; return the code that one has ended with, None before."""
        if self._new:
            self._submit()
        return self.code_of(job.task.result) if job.task.done() else None

    def send(self, number: int, running: Collection[Job]) -> None:
        """Cancel all jobs: running ones save and end, the others never start."""
        self.cancelled = True
        for job in running:
            job.task.cancel(check=False)

    def _submit(self) -> None:
        if self._executor is None:
            self._executor = self._open(self._new[0].run_dir.parent.absolute() / "submitit")
        with self._executor.batch():
            tasks = [self._executor.submit(job.task) for job in self._new]
        for job, task in zip(self._new, tasks, strict=True):
            job.task = task
        self._new = []
        # A job of an array is called by the array's number and its own.
        ids = dict.fromkeys(str(task.job_id).partition("_")[0] for task in tasks)
        cancel = f"{'scancel' if self._cluster == 'slurm' else 'kill'} {' '.join(ids)}"
        logger.info("they go on even if this process is killed; what cancels them then: %s", cancel)

    def _open(self, folder: Path) -> Any:
        submitit = _package("submitit")
        python = f"{quote(sys.executable)} -P"
        named = {f"{self._cluster}_python": python} if self._cluster in ("slurm", "local") else {}
        try:
            executor = submitit.AutoExecutor(folder, cluster=self._cluster, **named)
            # A job is one task on one node, which starts its processes itself.
            executor.update_parameters(**self._options, nodes=1, tasks_per_node=1)
        except Exception as error:
            hint = f"{_OPTIONS}.cluster=local tries it on this machine"
            raise ConfigError(_OPTIONS, first_lines(error), hint) from error
        return executor


class RayLauncher(Launcher):
    """Submit each job to Ray as a task; without an `address` Ray is started on this machine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._address = options.pop("address", None)
        self.description = f"jobs go to Ray{f' at {self._address}' if self._address else ''}"
        self._ray = _package("ray")
        try:
            # No retries of Ray's own: sweep.retries counts.
            self._task = self._ray.remote(**{**options, "max_retries": 0})(lambda job: job())
        except (ValueError, TypeError) as error:
            raise ConfigError(_OPTIONS, first_lines(error)) from error

    def start(self, job: Job, argv: Sequence[str], running: Collection[Job]) -> bool:
        """Submit a job to Ray, which starts it when there is room."""
        if not self._ray.is_initialized():
            self._begin()
        job.task = self._task.remote(NodeJob.of(job, argv))
        return True

    def poll(self, job: Job) -> int | None:
        """Return the code that a job has ended with, None before."""
        done, _ = self._ray.wait([job.task], timeout=0)
        return self.code_of(partial(self._ray.get, job.task)) if done else None

    def send(self, number: int, running: Collection[Job]) -> None:
        """Cancel all tasks: running jobs save and end, the others never start."""
        self.cancelled = True
        for job in running:
            self._ray.cancel(job.task)

    def close(self) -> None:
        """Leave Ray, or end the one that was started here."""
        self._ray.shutdown()

    def _begin(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
        handlers = {number: signal.getsignal(number) for number in stopping_signals()}
        try:
            self._ray.init(self._address, include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises many types when it cannot start
            raise ResourceError(f"no Ray was started or reached: {first_lines(error)}") from error
        for number, handler in handlers.items():  # Ray's own would leave at once on SIGTERM
            signal.signal(number, handler)
        # Tasks belong to the process that submits them: Ray kills those of a process that is lost.
        kill = f"kill {os.getpid()} (on {socket.gethostname()})"
        logger.info("they end with this process; what cancels them, and lets them save: %s", kill)


AnyLauncher = LocalLauncher | SubmititLauncher | RayLauncher
CLUSTERS: Mapping[str, type[SubmititLauncher | RayLauncher]] = {
    "submitit": SubmititLauncher,
    "ray": RayLauncher,
}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        message = f"{name} takes the package {name}: pip install {name}"
        raise ConfigError("sweep.launcher", message) from None
