"""Several processes of a run: started by torch's elastic launcher, each `python -m` this module.

They tell each other what happens through a folder (`Notes`), and the launcher reports the failure
that caused the others.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from regimen.conf.addresses import allow_protocols
from regimen.conf.errors import ConfigError, Problem
from regimen.scripts.cli.arguments import Request
from regimen.scripts.cli.console import (
    describe,
    exit_code,
    importing,
    log_to_stderr,
    print_error,
    set_up,
)
from regimen.scripts.cli.signals import (
    Handler,
    end_with_parent,
    handling,
    leave_after_second_interrupt,
)
from regimen.trainer.errors import PeerError, SilentPeerError, leave_at_once
from regimen.trainer.files.atomic import write_json
from regimen.trainer.runs.status import amend_failure
from regimen.trainer.targets.allow_list import TargetError, allow, locate

# Exit codes after which a restart may help: an unexpected error, a lost process, out of memory.
_MENDABLE = (1, 6, 8)
_STOPPED = (130, 143)
# Seconds after a failure in which torch's launcher kills nothing: after 30 it kills what hangs.
_PATIENCE = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """How a process failed."""

    rank: int
    code: int
    text: str
    time: float = 0.0
    traceback: str = ""
    by_peer: bool = False  # another process's failure was the cause
    unanswered: bool = False  # another process did not answer
    problems: Sequence[Mapping[str, Any]] = ()  # the fields of each problem of a ConfigError


class Notes:
    """A launcher's folder: the request, a file for each process, and three that tell by existing.

    `stopping`: a signal arrived, and starting processes exit. `finished`: the run ended without a
    failure. `run_dir` holds the path of the run directory. Nobody else may enter the folder: torch
    unpickles what the stores in it hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir, self.stopping = folder / "run_dir", folder / "stop"
        self.finished = folder / "finished"
        self.launcher_store = folder / "launcher.store"  # torch's, of the launcher alone
        self.store = folder / "processes.store"  # of the processes, through all restarts

    def sign(self, rank: int, failure: Failure | None = None) -> None:
        """Tell the id of this process, and how it failed; in place of an earlier attempt's."""
        told = {"pid": os.getpid(), "failure": failure and asdict(failure)}
        write_json(self.folder / f"rank-{rank}", told)

    def signed(self) -> list[dict[str, Any]]:
        """Return what the processes have told."""
        return [json.loads(path.read_text()) for path in self.folder.glob("rank-*")]


def work_of(request: Request, note: Path | None = None) -> Callable[[Request], int]:
    """Return what does a request: `launch`, where the strategy asks for processes, or the work."""
    alone = request.config["dry_run"] or "RANK" in os.environ
    if not alone and _starts_processes(request.config["strategy"]["_target_"]):
        return launch
    with importing():
        if request.prediction is not None:
            from regimen.scripts.runs.answers import answer

            return answer
        from regimen.scripts.runs.run import run
    return partial(run, note=note)


def _starts_processes(target: str) -> bool:
    """Return whether the class of a strategy starts processes; a wrong one is named later."""
    with importing(), suppress(TargetError):
        return bool(getattr(locate(target), "starts_processes", False))
    return False


def launch(request: Request) -> int:
    """Run a request in `strategy.devices` processes and return the run's exit code.

    Raises ResourceError if the machine cannot run them, ConfigError for a configuration error that
    a process found.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    arguments = dict(request.config["strategy"])
    strategy = locate(arguments.pop("_target_"))
    processes, max_restarts = strategy.launch_options(**arguments)
    # Unlike torchrun, which sets 1: the processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # `_answer` reports a failure, once.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    notes = Notes(Path(tempfile.mkdtemp(prefix="regimen-")))  # of mode 0700
    # Nothing listens on the network: the launcher's store is a file, and it opens no server for the
    # processes, which meet in a file of theirs.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(notes.launcher_store),
        # Each sign of life lengthens the file by 1 KB; it counts between launchers only.
        rdzv_configs={"store_type": "file", "keep_alive_interval": 600},
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(notes.folder)),
        # Signals that end a run are forwarded by us, without torch's timeout.
        signals_to_handle="SIGQUIT",
    )
    failures = dict[int, Any]()
    try:
        asked = {"request": asdict(request), "path": sys.path}
        (notes.folder / "request").write_text(json.dumps(asked))
        # -P: a file `regimen.py` in the working directory would hide the package.
        command = ("-P", "-m", "regimen.scripts.runs.launch", str(os.getpid()), str(notes.folder))
        with handling(_passing_on(notes)):
            try:
                elastic_launch(options, sys.executable)(*command)
            except (ChildFailedError, SignalException) as failed:
                failures = getattr(failed, "failures", failures)
            else:
                if notes.finished.exists():
                    return 0
        return _answer(first_failure(failures, processes, notes), request, notes)
    finally:
        shutil.rmtree(notes.folder, ignore_errors=True)


def _passing_on(notes: Notes) -> Handler:
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

    return handle


def first_failure(failures: Mapping[int, Any], processes: int, notes: Notes) -> Failure:
    """Return the failure that caused the others; `failures`: torch's of processes, by rank."""
    told = [Failure(**signed["failure"]) for signed in notes.signed() if signed["failure"]]
    stopping, lost = notes.stopping.exists(), None
    ended = sorted(failures.items(), key=lambda pair: pair[1].timestamp)
    for rank, it in ended:
        soon = it.timestamp < ended[0][1].timestamp + _PATIENCE
        if lost is None and it.exitcode < 0 and soon:
            name = signal.Signals(-it.exitcode).name
            why = ", often for lack of memory" if name == "SIGKILL" else ""
            lost = f"process {rank} (pid {it.pid}) was killed by {name}{why}"
    if ended and not stopping:  # torch's launcher stopped these, since another process had failed
        told = [failure for failure in told if failure.code not in _STOPPED]
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
    print_error(first.text + way_out, first.traceback if first.code == 1 else "")
    return first.code


def main() -> None:
    """Run one process's part of a run; a failure is reported in the folder of the launcher."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before this process could ask for that
        leave_at_once(PeerError.exit_code)
    set_up()
    notes, rank = Notes(Path(sys.argv[2])), int(os.environ["RANK"])
    log_to_stderr(rank == 0)
    code = 0
    try:
        notes.sign(rank)
        if not notes.stopping.exists():
            asked = json.loads((notes.folder / "request").read_text())
            sys.path[:] = asked["path"]
            request = Request(**asked["request"])
            allow(request.allowed)
            allow_protocols(request.overrides)
            with importing():
                from regimen.trainer.distributed import STORE
            os.environ[STORE] = str(notes.store)
            code = work_of(request, notes.run_dir)(request)
            if rank == 0:
                notes.finished.touch()
    except BaseException as error:
        code = _fail(error, rank, notes)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # without waiting for threads that wait for other processes
        leave_at_once(code)
    sys.exit(0)


def _fail(error: BaseException, rank: int, notes: Notes) -> int:
    """Report an exception; return 0 if the launcher must not restart the processes."""
    code = exit_code(error)
    shown = "".join(traceback.format_exception(error))
    peers = isinstance(error, PeerError), isinstance(error, SilentPeerError)
    problems = [asdict(p) for p in error.problems] if isinstance(error, ConfigError) else ()
    told = describe(error)
    notes.sign(rank, Failure(rank, code, told, time.time(), shown, *peers, problems))
    restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    hopeless = restarts and code not in _MENDABLE
    return 0 if code in _STOPPED or notes.stopping.exists() or hopeless else code


if __name__ == "__main__":
    main()
