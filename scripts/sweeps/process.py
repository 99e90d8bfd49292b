"""One job of a sweep, in a process of its own."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from scripts.cli.request import quoted
from trainer.errors import stopping_signals
from trainer.runs.status import RunDirectoryError, read_status

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Outcome:
    """How a job ended."""

    number: int
    run_dir: Path
    overrides: dict[str, str]
    state: str = "not started"
    code: int = 0
    reason: str = ""
    seconds: float | None = None
    results: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Tell whether the job ran and did not end well."""
        return self.state not in ("finished", "not started")


@dataclass(slots=True)
class Stop:
    """Which signal asked the sweep to end."""

    number: int | None = None

    @property
    def code(self) -> int:
        """Return the exit code that the signal stands for."""
        return 130 if self.number == signal.SIGINT else 143


def command(flags: Sequence[str], overrides: Sequence[str], run_dir: Path) -> list[str]:
    """Return the command line of a job.

    `-P` keeps the folder where the sweep was started off the front of the module path: a folder of
    the user's called `data` or `scripts` would take the place of ours.
    """
    target = f"run_dir={quoted(str(run_dir))}"
    return [sys.executable, "-P", "-m", "scripts.train", *flags, *overrides, target]


def run_job(job: Outcome, argv: Sequence[str], stop: Stop) -> None:
    """Run a job to its end, passing on what it says, and note how it ended."""
    started = time.monotonic()
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
    with _forwarding(process, stop):
        code = process.wait()
    reader.join(timeout=2.0)  # a helper of a killed job may hold its pipe open
    job.seconds = time.monotonic() - started
    job.code = 128 - code if code < 0 else code
    _note_outcome(job, errors)


def _note_outcome(job: Outcome, errors: list[str]) -> None:
    try:
        status: dict[str, Any] = read_status(job.run_dir)
    except RunDirectoryError:
        status = {}
    job.state = "finished" if job.code == 0 else str(status.get("state") or "failed")
    if job.code and job.state == "finished":
        job.state = "failed"
    job.reason = "" if job.code == 0 else str(status.get("reason") or (errors or [""])[-1])
    job.results = status.get("results") or {}


def _pass_on(source: IO[str] | None, errors: list[str]) -> None:
    """Copy a job's stderr line by line, and keep its `error:` lines."""
    assert source is not None
    for line in source:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").strip())


@contextmanager
def _forwarding(process: "subprocess.Popen[str]", stop: Stop) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        stop.number = stop.number or number
        try:
            # As a terminal does it, all processes of a job hear a Ctrl-C.
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        except ProcessLookupError:
            pass

    before = {number: signal.signal(number, forward) for number in stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Ask Linux to end the job if the sweep is killed; elsewhere it would go on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
