"""Jobs on other machines: as tasks of a SLURM job array, through submitit, or of a Ray cluster.

They share the folder of the sweep only; it must be on a file system that all machines see.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.console import logger
from scripts.composition.identity import refuse_untyped
from scripts.sweeps import local
from scripts.sweeps.leaderboard import Job
from scripts.sweeps.local import Ended
from trainer.errors import ResourceError, stopping_signals
from trainer.runs.status import holds_run

_OPTIONS = "sweep.launcher_options"
_PATIENCE = 0.1  # seconds between two looks at a job
# Options that ask for resources: files may set them, to a number or a word. The others name
# programs, shell lines, files or machines.
_RESOURCES = re.compile(
    r"(slurm_)?(account|array_parallelism|constraint|exclude|exclusive|gres|job_name|partition|qos"
    r"|time|nodes|n?tasks_per_node|[cg]pus_per_\w+|mem(_\w+)?|num_[cg]pus)"
    r"|cluster|timeout_min|name|memory|accelerator_type"
)


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


@dataclass(slots=True)
class NodeJob:
    """A job on the machine that a cluster has chosen; a call returns the exit code of `train`."""

    argv: Sequence[str]
    run_dir: str
    output: str
    folder: str  # the working directory of the sweep
    module: str
    process: "subprocess.Popen[bytes] | None" = field(default=None, compare=False)

    @classmethod
    def of(cls, job: Job, argv: Sequence[str]) -> "NodeJob":
        """Return a job with absolute paths, which can be pickled."""
        run_dir, output = os.path.abspath(job.run_dir), os.path.abspath(job.output)
        return cls(list(argv), run_dir, output, os.getcwd(), local.TRAIN)

    def __call__(self) -> int:
        """Run the job; one that has begun is resumed, on whichever machine it ran before."""
        self.process = local.start_process(
            self.module, self.words(), Path(self.output), folder=self.folder
        )
        try:
            while self.process.poll() is None:  # signals are handled in between
                time.sleep(_PATIENCE)
        except KeyboardInterrupt:  # as Ray cancels a task
            self.stop(signal.SIGTERM)
        return self.process.wait()

    def words(self) -> list[str]:
        """Return the arguments of `train`."""
        if not holds_run(Path(self.run_dir)):
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


class SubmititLauncher:
    """Submit jobs that start together as one array, and poll the state of each."""

    quiet = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._cluster = options.pop("cluster", "slurm")
        self._options = options
        self._executor: Any = None
        self._new: list[tuple[Job, NodeJob]] = []
        self._jobs: dict[int, tuple[Job, Any]] = {}
        self._cancelled = False
        with tempfile.TemporaryDirectory() as folder:  # invalid options leave no files behind
            self._open(Path(folder))

    def describe(self) -> str:
        """Describe where jobs run."""
        return f"jobs go to {self._cluster} through submitit"

    def start(self, job: Job, argv: Sequence[str]) -> bool:
        """Keep a job for the next submission."""
        self._new.append((job, NodeJob.of(job, argv)))
        return True

    def wait(self, seconds: float) -> Ended:
        """Submit new jobs, then return the jobs that have ended: at the latest after `seconds`."""
        if self._new:
            self._submit()
        deadline = time.monotonic() + seconds
        while True:
            done = [number for number, (_, task) in self._jobs.items() if task.done()]
            if done or time.monotonic() > deadline:
                return [self._end(*self._jobs.pop(number)) for number in done]
            time.sleep(_PATIENCE)

    def send(self, number: int) -> None:
        """Cancel all jobs: running ones save and end, the others never start."""
        self._cancelled = True
        for _, task in self._jobs.values():
            task.cancel(check=False)

    def close(self) -> None:
        """Do nothing: there is no resource to release."""

    def _submit(self) -> None:
        if self._executor is None:
            folder = self._new[0][0].run_dir.parent
            self._executor = self._open(folder.absolute() / "submitit")
        with self._executor.batch():
            tasks = [self._executor.submit(node_job) for _, node_job in self._new]
        started = zip(self._new, tasks, strict=True)
        self._jobs |= {job.number: (job, task) for (job, _), task in started}
        self._new = []
        # A job of an array is called by the array's number and its own.
        ids = dict.fromkeys(str(task.job_id).partition("_")[0] for task in tasks)
        cancel = f"{'scancel' if self._cluster == 'slurm' else 'kill'} {' '.join(ids)}"
        logger.info("they go on even if this process is killed; what cancels them then: %s", cancel)

    def _end(self, job: Job, task: Any) -> tuple[Job, int]:
        try:
            return job, int(task.result())
        except Exception:  # lost with its machine, cancelled, or out of time for good
            return job, -(signal.SIGTERM if self._cancelled else signal.SIGKILL)

    def _open(self, folder: Path) -> Any:
        submitit = _package("submitit")
        python = f"{quote(sys.executable)} -P"
        named = {f"{self._cluster}_python": python} if self._cluster in ("slurm", "local") else {}
        try:
            executor = submitit.AutoExecutor(folder, cluster=self._cluster, **named)
            executor.update_parameters(**self._options)
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = f"{_OPTIONS}.cluster=local tries it on this machine"
            raise ConfigError(Problem(_OPTIONS, message, hint)) from error
        if self._options.get("tasks_per_node", 1) != 1 or self._options.get("nodes", 1) != 1:
            message = "a job is one task on one node, which starts its processes itself"
            raise ConfigError(Problem(_OPTIONS, message, "leave out nodes and tasks_per_node"))
        return executor


class RayLauncher:
    """Submit each job to Ray as a task; without an `address` Ray is started on this machine."""

    quiet = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._address = options.pop("address", None)
        self._ray = _package("ray")
        try:
            # No retries of Ray's own: sweep.retries counts.
            self._task = self._ray.remote(**{"num_cpus": 1, **options, "max_retries": 0})(_call)
        except (ValueError, TypeError) as error:
            raise ConfigError(Problem(_OPTIONS, str(error).splitlines()[0])) from error
        self._jobs: dict[Any, Job] = {}
        self._own = False  # whether Ray was started here
        self._cancelled = False

    def describe(self) -> str:
        """Describe where jobs run."""
        return f"jobs go to Ray{f' at {self._address}' if self._address else ''}"

    def start(self, job: Job, argv: Sequence[str]) -> bool:
        """Submit a job to Ray, which starts it when there is room."""
        if not self._ray.is_initialized():
            self._begin()
        self._jobs[self._task.remote(NodeJob.of(job, argv))] = job
        return True

    def wait(self, seconds: float) -> Ended:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`."""
        if not self._jobs:
            return []
        done, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        return [(self._jobs.pop(reference), self._code(reference)) for reference in done]

    def send(self, number: int) -> None:
        """Cancel all tasks: running jobs save and end, the others never start."""
        self._cancelled = True
        for reference in self._jobs:
            self._ray.cancel(reference)

    def close(self) -> None:
        """Shut Ray down if it was started here."""
        if self._own:
            self._ray.shutdown()

    def _begin(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
        handlers = {number: signal.getsignal(number) for number in stopping_signals()}
        try:
            self._ray.init(self._address, include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises many types when it cannot start
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ResourceError(f"Ray cannot be started or reached: {reason}") from error
        self._own = True
        for number, handler in handlers.items():  # Ray's own would leave at once on SIGTERM
            signal.signal(number, handler)
        # Tasks belong to the process that submits them: Ray kills those of a process that is lost.
        kill = f"kill {os.getpid()} (on {socket.gethostname()})"
        logger.info("they end with this process; what cancels them, and lets them save: %s", kill)

    def _code(self, reference: Any) -> int:
        try:
            return int(self._ray.get(reference))
        except self._ray.exceptions.RayError:  # cancelled, out of memory, or lost with its machine
            return -(signal.SIGTERM if self._cancelled else signal.SIGKILL)


def _call(job: NodeJob) -> int:
    return job()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        message = f"{name} takes the package {name}: pip install {name}"
        raise ConfigError(Problem("sweep.launcher", message)) from None
