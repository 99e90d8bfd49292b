"""One job of a sweep, in a process of its own."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from scripts.cli.request import quoted
from trainer.errors import stopping_signals
from trainer.runs.status import RunDirectoryError, read_status

NOT_STARTED = "not started"
_PR_SET_PDEATHSIG = 1


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

    @property
    def failed(self) -> bool:
        """Return whether the job ran and did not end well."""
        return self.state not in ("finished", "stopped", NOT_STARTED)


@dataclass(slots=True)
class Stop:
    """Which signal asked the sweep to end; the job that runs is told."""

    number: int | None = None
    job: "subprocess.Popen[str] | None" = None

    @property
    def code(self) -> int:
        """Return the exit code that the signal stands for."""
        return 130 if self.number == signal.SIGINT else 143

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals, and pass them on, instead of ending at once."""
        before = {n: signal.signal(n, self._hear) for n in stopping_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.pass_on(number)

    def pass_on(self, number: int) -> None:
        """Send a signal to the job that runs, if there is one."""
        if self.job is None:
            return
        try:
            # As a terminal does it, all processes of a job hear a Ctrl-C.
            if number == signal.SIGINT:
                os.killpg(self.job.pid, number)
            else:
                self.job.send_signal(number)
        except ProcessLookupError:
            pass


def command(flags: Sequence[str], overrides: Sequence[str], run_dir: Path) -> list[str]:
    """Return the command line of a job.

    `-P` keeps the folder where the sweep was started off the front of the module path: a folder of
    the user's called `data` or `scripts` would take the place of ours.
    """
    target = f"run_dir={quoted(str(run_dir))}"
    return [sys.executable, "-P", "-m", "scripts.train", *flags, *overrides, target]


def run_job(job: Outcome, argv: Sequence[str], stop: Stop) -> None:
    """Run a job to its end, passing on what it says, and note how it ended."""
    # A process group of its own: a Ctrl-C reaches it once, through us.
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
        preexec_fn=_end_with_parent,
    )
    errors: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process.stderr, errors), daemon=True)
    reader.start()
    stop.job = process
    if stop.number is not None:  # it came while the process was made
        stop.pass_on(stop.number)
    code = process.wait()
    stop.job = None
    reader.join(timeout=2.0)  # a helper of a killed job may hold its pipe open
    note_outcome(job, code, errors)


def note_outcome(job: Outcome, code: int, errors: Sequence[str] = ()) -> None:
    """Note how a job's process ended, by its code (-N: killed by signal N) and its status."""
    try:
        status: dict[str, Any] = read_status(job.run_dir)
    except RunDirectoryError:
        status = {}
    state = str(status.get("state") or ("failed" if code else "finished"))
    job.state = "failed" if code and state in ("finished", "running") else state
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


def _pass_on(source: IO[str] | None, errors: list[str]) -> None:
    """Copy a job's stderr line by line, and keep its `error:` lines."""
    assert source is not None
    for line in source:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").strip())


def _end_with_parent() -> None:
    """Ask Linux to end the job if the sweep is killed; elsewhere it would go on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
