"""The interface of launchers: start jobs, and report the end of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TRAIN = "scripts.train"


@dataclass(frozen=True, slots=True)
class Launch:
    """A job to run: the arguments of `train`, and where its files go."""

    number: int
    argv: Sequence[str]
    run_dir: Path
    output: Path  # its output, unless it has the terminal
    strategy: Mapping[str, Any] = field(default_factory=dict)  # of its configuration


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a job ended."""

    number: int
    code: int  # -N: killed by signal N
    errors: Sequence[str] = ()  # the text of its `error:` lines


class Launcher(Protocol):
    """Run jobs, several at a time."""

    quiet: bool  # whether the output of jobs goes to files

    def describe(self) -> str:
        """Describe how many jobs run at the same time, and on which resources."""

    def start(self, launch: Launch) -> bool:
        """Start a job and return at once; return False if there is no room for it now."""

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`."""

    def send(self, number: int) -> None:
        """Send a signal to all running jobs, and cancel those that have not begun."""

    def close(self) -> None:
        """Release the resources of the launcher; no job is running."""


def error_lines(text: str) -> list[str]:
    """Return the text of the `error:` lines of an output."""
    mark = "error: "
    lines = text.splitlines()
    return [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]


def errors_of(output: Path, offset: int = 0) -> list[str]:
    """Return the text of the `error:` lines of an output file after `offset`."""
    try:
        with output.open("rb") as file:
            file.seek(offset)
            return error_lines(file.read().decode(errors="replace"))
    except OSError:
        return []
