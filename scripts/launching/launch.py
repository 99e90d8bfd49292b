"""Start the processes of a run with torch's elastic launcher, and report their failure."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from conf.errors import ConfigError, Problem
from scripts.cli.request import Request
from scripts.cli.signals import leave_after_second_interrupt
from scripts.launching.rank import STOPPED, Failure, Notes
from trainer.errors import PeerError, stopping_signals
from trainer.files.layout import indented_lines, visible
from trainer.runs.status import amend_failure
from trainer.strategies.strategy import check_processes, count_devices

# Seconds after a failure in which torch's launcher kills nothing: after 30 it kills what hangs.
_PATIENCE = 20


def launch(request: Request) -> int:
    """Run a request in `strategy.devices` processes and return the run's exit code.

    Raises ResourceError if the machine cannot run them, ConfigError for a configuration error that
    a process found.
    """
    strategy = request.config["strategy"]
    processes = count_devices(strategy["devices"], strategy["accelerator"])
    check_processes(processes, strategy["accelerator"], strategy["backend"])
    # Unlike torchrun, which sets 1: the processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # `_answer` reports a failure, once.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    notes = Notes(Path(tempfile.mkdtemp(prefix="regimen-")))
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=strategy["max_restarts"],
        logs_specs=DefaultLogsSpecs(log_dir=str(notes.folder)),
        # Signals that end a run are forwarded by us, without torch's timeout.
        signals_to_handle="SIGQUIT",
    )
    error = None
    try:
        notes.write("request", {"request": asdict(request), "path": sys.path})
        with _passing_signals_on(notes):
            try:
                # -P: a folder `scripts` in the working directory would shadow ours.
                command = ("-P", "-m", "scripts.launching.rank", str(notes.folder))
                elastic_launch(options, sys.executable)(*command)
            except (ChildFailedError, SignalException) as failed:
                error = failed
        if error is None and notes.finished.exists():
            return 0
        return _answer(first_failure(error, processes, notes), request, notes)
    finally:
        shutil.rmtree(notes.folder, ignore_errors=True)


@contextmanager
def _passing_signals_on(notes: Notes) -> Iterator[None]:
    """Forward signals to the processes, which have their own sessions; a second Ctrl-C kills."""

    def send(kill: Callable[[int, int], None], number: int) -> None:
        for process in notes.signed():
            with suppress(ProcessLookupError):
                kill(process["pid"], number)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and notes.stopping.exists():
            send(os.killpg, signal.SIGKILL)
            shutil.rmtree(notes.folder, ignore_errors=True)
            leave_after_second_interrupt()
        notes.stopping.touch()
        send(os.kill, number)

    before: dict[int, Any] = {n: signal.signal(n, handle) for n in stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_failure(error: BaseException | None, processes: int, notes: Notes) -> Failure:
    """Return the failure that caused the others; `error` is what torch's launcher raised."""
    told = [Failure(**signed["failure"]) for signed in notes.signed() if signed["failure"]]
    stopping, lost = notes.stopping.exists(), None
    if isinstance(error, ChildFailedError):
        lost = _killed(error)
        if not stopping:  # torch's launcher stopped these, since another process had failed
            told = [failure for failure in told if failure.code not in STOPPED]
    first = min(told, key=lambda failure: (failure.by_peer, failure.time), default=None)
    if first is not None and not first.by_peer:
        return first
    gone = set(range(processes)) - {failure.rank for failure in told}
    if lost is None and stopping:
        return Failure(0, 143, "stopped before the processes had started")
    if lost is None and first is not None and (first.unanswered or not gone):
        return first
    text = lost or f"process {min(gone, default=0)} left before the run was over"
    return Failure(0, PeerError.exit_code, text)


def _killed(error: ChildFailedError) -> str | None:
    """Return which process was killed by a signal from outside; None if none was."""
    begin = min(failure.timestamp for failure in error.failures.values())
    killed = [
        (failure.timestamp, rank, failure)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and failure.timestamp < begin + _PATIENCE
    ]
    if not killed:
        return None
    _, rank, failure = min(killed)
    name = signal.Signals(-failure.exitcode).name
    why = ", often for lack of memory" if name == "SIGKILL" else ""
    return f"process {rank} (pid {failure.pid}) was killed by {name}{why}"


def _answer(first: Failure, request: Request, notes: Notes) -> int:
    """Report the first failure and return its exit code. Raises ConfigError if it was one."""
    way_out = ""
    if notes.run_dir.exists():
        run_dir = Path(notes.run_dir.read_text())
        command = request.resume_command(run_dir)
        amend_failure(run_dir, first.code, first.text, command)
        way_out = f"; go on with: {command}" if first.code == PeerError.exit_code else ""
    if first.problems:
        raise ConfigError(Problem(**fields) for fields in first.problems)
    if first.code == 1:
        print(visible(first.traceback), file=sys.stderr)
    line, *rest = indented_lines(first.text + way_out)
    print(f"error: {line}", *rest, sep="\n", file=sys.stderr)
    return first.code
