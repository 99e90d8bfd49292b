"""One job of a sweep: its command line, how it ended, and the signals that end a sweep."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.cli.request import quoted
from trainer.errors import stopping_signals
from trainer.runs.status import ENDED_WELL, RunDirectoryError, read_status

NOT_STARTED = "not started"


@dataclass(slots=True)
class Outcome:
    """How a job ended."""

    number: int
    run_dir: Path
    overrides: dict[str, str]
    state: str = NOT_STARTED
    code: int = 0
    reason: str = ""
    seconds: float | None = None
    results: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # {} where it is not known
    more: list[str] = field(default_factory=list)  # overrides that do not affect what it trains

    @property
    def failed(self) -> bool:
        """Return whether the job ran and did not end well."""
        return self.state not in (*ENDED_WELL, "stopped", NOT_STARTED)


@dataclass(slots=True)
class Stop:
    """The signal that asked the sweep to end, and the signals that its jobs have not received."""

    number: int | None = None
    untold: list[int] = field(default_factory=list)

    @property
    def code(self) -> int:
        """Return the exit code of the signal."""
        return 130 if self.number == signal.SIGINT else 143

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals instead of ending at once."""
        before = {n: signal.signal(n, self._hear) for n in stopping_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def heard(self) -> list[int]:
        """Return the signals to forward to the jobs, each once."""
        heard = self.untold.copy()
        del self.untold[: len(heard)]
        return heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.untold.append(number)


def words(flags: Sequence[str], overrides: Sequence[str], run_dir: Path) -> list[str]:
    """Return the arguments of `train` for a job."""
    return [*flags, *overrides, f"run_dir={quoted(str(run_dir))}"]


def note_outcome(job: Outcome, code: int, errors: Sequence[str] = ()) -> None:
    """Note how a job's process ended, by its code (-N: killed by signal N) and its status."""
    try:
        status: dict[str, Any] = read_status(job.run_dir)
    except RunDirectoryError:
        status = {}
    state = str(status.get("state") or ("failed" if code else "finished"))
    job.state = "failed" if code and state in (*ENDED_WELL, "running") else state
    job.code = 128 - code if code < 0 else code
    job.reason = _reason(code, status, errors) if code else ""
    job.seconds = status.get("seconds")
    job.results = status.get("results") or {}


def _reason(code: int, status: dict[str, Any], errors: Sequence[str]) -> str:
    if code >= 0:
        return str(status.get("reason") or (errors or [""])[-1])
    memory = " (out of memory?)" if code == -signal.SIGKILL else ""
    command = status.get("resume")
    way_out = f"; go on with: {command}" if command else ""
    return f"killed by {signal.Signals(-code).name}{memory}{way_out}"
