"""The interface of launchers: run these jobs, tell when each ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TRAIN = "scripts.train"


@dataclass(frozen=True, slots=True)
class Launch:
    """A job that is to run: the words behind `train`, and where its files go."""

    number: int
    argv: Sequence[str]
    run_dir: Path
    output: Path  # what it prints, where the terminal is not its own
    strategy: Mapping[str, Any] = field(default_factory=dict)  # of its configuration


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a job ended."""

    number: int
    code: int  # -N: killed by signal N
    errors: Sequence[str] = ()  # what its `error:` lines say


class Launcher(Protocol):
    """Runs jobs, several at a time."""

    quiet: bool  # whether what jobs print goes to files

    def describe(self) -> str:
        """Say how many jobs run at the same time, and with what."""

    def start(self, launch: Launch) -> bool:
        """Start a job and return at once; false where there is no room for it now."""

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, as soon as there are some, or after so many seconds."""

    def send(self, number: int) -> None:
        """Send a signal to all jobs that run, and give up those that have not begun."""

    def close(self) -> None:
        """Release what the launcher holds; no job runs any more."""


def error_lines(text: str) -> list[str]:
    """Return what the `error:` lines of an output say."""
    mark = "error: "
    lines = text.splitlines()
    return [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]


def errors_of(output: Path, offset: int = 0) -> list[str]:
    """Return what the `error:` lines of an output file say, from a position on."""
    try:
        with output.open("rb") as file:
            file.seek(offset)
            return error_lines(file.read().decode(errors="replace"))
    except OSError:
        return []
