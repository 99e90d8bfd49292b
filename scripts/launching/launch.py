"""Start the processes of a run with torch's elastic launcher, and report their failure."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from conf.errors import ConfigError, Problem
from scripts.cli.request import Request
from scripts.launching.notes import FailureReport, LaunchNotes
from scripts.runs.signals import leave_after_second_interrupt
from trainer.distributed.machine import check_processes
from trainer.errors import stopping_signals
from trainer.files.log_format import indented_lines, visible
from trainer.runs.status import amend_failure
from trainer.strategies.strategy import count_devices

_PEER = 6  # exit code: a process of the run was lost
_STOPPED = (130, 143)
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
    notes = LaunchNotes(Path(tempfile.mkdtemp(prefix="regimen-")))
    try:
        notes.ask(request, sys.path)
        with _passing_signals_on(notes):
            error = _run(_config(processes, strategy["max_restarts"], notes), notes)
        return (
            0 if error is None and notes.finished() else _answer(error, processes, request, notes)
        )
    finally:
        shutil.rmtree(notes.folder, ignore_errors=True)


def _config(processes: int, max_restarts: int, notes: LaunchNotes) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(notes.folder)),
        # Signals that end a run are forwarded by us, without torch's timeout.
        signals_to_handle="SIGQUIT",
    )


def _run(config: LaunchConfig, notes: LaunchNotes) -> BaseException | None:
    """Start the processes and wait for them; return the error that they ended with, or None."""
    command = elastic_launch(config, sys.executable)
    try:
        # -P: a folder `scripts` in the working directory would shadow ours.
        command("-P", "-m", "scripts.launching.rank", str(notes.folder))
    except (ChildFailedError, SignalException) as error:
        return error
    return None


@contextmanager
def _passing_signals_on(notes: LaunchNotes) -> Iterator[None]:
    """Forward signals to the processes, which have their own sessions; a second Ctrl-C kills."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and notes.stopping():
            _end_all(notes)
        notes.stop()
        for pid in notes.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before: dict[int, Any] = {n: signal.signal(n, handle) for n in stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_all(notes: LaunchNotes) -> NoReturn:
    for pid in notes.pids():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(notes.folder, ignore_errors=True)
    leave_after_second_interrupt()


def _answer(
    error: BaseException | None, processes: int, request: Request, notes: LaunchNotes
) -> int:
    """Report the first failure and return its exit code. Raises ConfigError if it was one."""
    first = _first(error, processes, notes)
    way_out = ""
    if notes.run_dir.exists():
        run_dir = Path(notes.run_dir.read_text())
        command = request.resume_command(run_dir)
        amend_failure(run_dir, first.code, first.text, command)
        way_out = f"; go on with: {command}" if first.code == _PEER else ""
    if first.problems:
        raise ConfigError(Problem(**fields) for fields in first.problems)
    if first.code == 1:
        print(visible(first.traceback), file=sys.stderr)
    line, *rest = indented_lines(first.text + way_out)
    print(f"error: {line}", *rest, sep="\n", file=sys.stderr)
    return first.code


def _first(error: BaseException | None, processes: int, notes: LaunchNotes) -> FailureReport:
    """Return the failure that caused the others."""
    reports = notes.reports()
    if isinstance(error, ChildFailedError) and not notes.stopping():
        # torch's launcher stopped these, since another process had failed.
        reports = [report for report in reports if report.code not in _STOPPED]
    if reports and not reports[0].by_peer:
        return reports[0]
    lost = _killed(error)
    gone = set(range(processes)) - {report.rank for report in reports}
    if lost is None and notes.stopping():
        return FailureReport(0, 143, "stopped before the processes had started", 0.0, "")
    if lost is None and reports and (reports[0].unanswered or not gone):
        return reports[0]
    text = lost or f"process {min(gone, default=0)} left before the run was over"
    return FailureReport(0, _PEER, text, 0.0, "", by_peer=True)


def _killed(error: BaseException | None) -> str | None:
    """Return which process was killed by a signal from outside; None if none was."""
    if not isinstance(error, ChildFailedError):
        return None
    first = min(failure.timestamp for failure in error.failures.values())
    killed = {
        rank: failure
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and failure.timestamp < first + _PATIENCE
    }
    for rank, failure in sorted(killed.items(), key=lambda pair: pair[1].timestamp):
        name = signal.Signals(-failure.exitcode).name
        why = ", often for lack of memory" if name == "SIGKILL" else ""
        return f"process {rank} (pid {failure.pid}) was killed by {name}{why}"
    return None
