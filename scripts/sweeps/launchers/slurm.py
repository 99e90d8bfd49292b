"""Jobs as tasks of a SLURM job array, through submitit."""

import importlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from shlex import quote
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.console import logger
from scripts.sweeps.launchers.launcher import Ended, Launch, errors_of
from scripts.sweeps.launchers.on_node import NodeJob

_OPTIONS = "sweep.launcher_options"
_PATIENCE = 0.2  # seconds


class SubmititLauncher:
    """Submit jobs that start together as one array, and poll the state of each."""

    quiet = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._cluster = self._options.pop("cluster", "slurm")
        self._executor: Any = None
        self._new: list[Launch] = []
        self._jobs: dict[int, tuple[Launch, Any]] = {}
        self._cancelled = False
        with tempfile.TemporaryDirectory() as folder:  # invalid options leave no files behind
            self._open(Path(folder))

    def describe(self) -> str:
        """Describe where jobs run."""
        return f"jobs go to {self._cluster} through submitit"

    def start(self, launch: Launch) -> bool:
        """Keep a job for the next submission."""
        self._new.append(launch)
        return True

    def wait(self, seconds: float) -> list[Ended]:
        """Submit new jobs, then return the jobs that have ended: at the latest after `seconds`."""
        self._submit()
        deadline = time.monotonic() + seconds
        while not (ended := self._ended()) and time.monotonic() < deadline:
            time.sleep(_PATIENCE)
        return ended

    def send(self, number: int) -> None:
        """Cancel all jobs: running ones save and end, the others never start."""
        self._cancelled = True
        for _, job in self._jobs.values():
            job.cancel(check=False)

    def close(self) -> None:
        """Do nothing: there is no resource to release."""

    def _submit(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        if self._executor is None:
            self._executor = self._open(new[0].run_dir.parent.absolute() / "submitit")
        with self._executor.batch():
            jobs = [self._executor.submit(NodeJob.of(launch)) for launch in new]
        self._jobs |= {one.number: (one, job) for one, job in zip(new, jobs, strict=True)}
        # A job of an array is called by the array's number and its own.
        ids = dict.fromkeys(str(job.job_id).partition("_")[0] for job in jobs)
        cancel = f"{'scancel' if self._cluster == 'slurm' else 'kill'} {' '.join(ids)}"
        logger.info("they go on even if this process is killed; what cancels them then: %s", cancel)

    def _ended(self) -> list[Ended]:
        done = [number for number, (_, job) in self._jobs.items() if job.done()]
        return [self._note(*self._jobs.pop(number)) for number in done]

    def _note(self, launch: Launch, job: Any) -> Ended:
        try:
            code = int(job.result())
        except Exception:  # lost with its machine, cancelled, or out of time for good
            code = -(signal.SIGTERM if self._cancelled else signal.SIGKILL)
        return Ended(launch.number, code, errors_of(launch.output))

    def _open(self, folder: Path) -> Any:
        submitit = _submitit()
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


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        message = "submitit takes the package submitit: pip install submitit"
        raise ConfigError(Problem("sweep.launcher", message)) from None
