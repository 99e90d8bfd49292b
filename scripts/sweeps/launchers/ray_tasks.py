"""Jobs as tasks of a Ray cluster."""

import importlib
import logging
import os
import signal
import socket
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.console import logger
from scripts.sweeps.launchers.launcher import Ended, Launch, errors_of
from scripts.sweeps.launchers.on_node import NodeJob
from trainer.errors import ResourceError, stopping_signals

_OPTIONS = "sweep.launcher_options"


class RayLauncher:
    """Submit each job to Ray as a task; without an `address` Ray is started on this machine."""

    quiet = True

    def __init__(self, options: dict[str, Any]) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        self._address = given.pop("address", None)
        self._ray = _ray()
        self._options = {"num_cpus": 1, **given, "max_retries": 0}  # sweep.retries counts
        try:
            self._task = self._ray.remote(**self._options)(_run)
        except (ValueError, TypeError) as error:
            raise ConfigError(Problem(_OPTIONS, str(error).splitlines()[0])) from error
        self._jobs: dict[Any, Launch] = {}
        self._own = False  # whether Ray was started here
        self._cancelled = False

    def describe(self) -> str:
        """Describe where jobs run."""
        return f"jobs go to Ray{f' at {self._address}' if self._address else ''}"

    def start(self, launch: Launch) -> bool:
        """Submit a job to Ray, which starts it when there is room."""
        if not self._ray.is_initialized():
            self._begin()
        self._jobs[self._task.remote(NodeJob.of(launch))] = launch
        return True

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`."""
        if not self._jobs:
            return []
        done, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        return [self._note(reference) for reference in done]

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
        logger.info(
            "they end with this process; what cancels them, and lets them save: kill %d (on %s). "
            "If it is killed itself (kill -9), Ray kills them: resume=auto goes on from their last "
            "checkpoints",
            os.getpid(),
            socket.gethostname(),
        )

    def _note(self, reference: Any) -> Ended:
        launch = self._jobs.pop(reference)
        try:
            code = int(self._ray.get(reference))
        except self._ray.exceptions.RayError:  # cancelled, out of memory, or lost with its machine
            code = -(signal.SIGTERM if self._cancelled else signal.SIGKILL)
        return Ended(launch.number, code, errors_of(launch.output))


def _run(job: NodeJob) -> int:
    return job()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        message = "ray takes the package ray: pip install ray"
        raise ConfigError(Problem("sweep.launcher", message)) from None
