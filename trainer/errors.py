"""The failures a run can end with: each knows its exit code, and its text names the way out."""

import multiprocessing
import os
import signal
from typing import NoReturn, Self

from conf.errors import ConfigError

# What ends a run, and the exit code that goes with it. SIGUSR1 is what batch systems send ahead of
# a preemption, SIGHUP what a terminal sends that is closed: both count as SIGTERM.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 143}


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that end a run here: under nohup a closed terminal is none of them."""
    left_alone = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in EXIT_CODES if not (left_alone and n == signal.SIGHUP)]


class RunError(Exception):
    """A failure with a known cause: printed as one `error:` line, without a traceback."""

    exit_code = 1


class CheckpointError(RunError):
    """A checkpoint that cannot be used, or a resume that was refused."""

    exit_code = 4


class DivergedError(RunError):
    """The loss or a gradient is not finite."""

    exit_code = 5


class PeerError(RunError):
    """Another process of the group failed or left."""

    exit_code = 6


class SilentPeerError(PeerError):
    """Another process of the group did not answer in time."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Say how long this process waited."""
        return cls(f"another process did not answer within {seconds:g} s (strategy.timeout)")


class StorageError(RunError):
    """A file of the run could not be written."""

    exit_code = 7


class ResourceError(RunError):
    """Memory or a worker process gave out."""

    exit_code = 8


class Interrupted(RunError):  # noqa: N818 (nothing went wrong)
    """A signal ended the run after its checkpoint was saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelError(ConfigError, RunError):
    """A model that does not fit its task or its data."""


class UserCodeError(RunError):
    """A function of the user's that returned what it must not: shown with a traceback."""


class SampleError(RunError):
    """Samples that do not fit the task."""

    exit_code = 3


def leave_at_once(code: int) -> NoReturn:
    """End this process and its workers now: what is on disk is whole at every moment."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
