"""Start the processes of a run by torch's elastic launcher; each is `python -m` this module.

The launcher and its processes exchange files in a folder (`RankFiles`), and the launcher reports
the failure that caused the others.
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
from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.data.tokenizers import allow_remote_code
from regimen.scripts.cli.arguments import RunRequest
from regimen.scripts.cli.console import (
    describe,
    end_process,
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
    signal_name,
)
from regimen.trainer.errors import PeerError, SilentPeerError, leave_at_once
from regimen.trainer.files.atomic import write_json
from regimen.trainer.runs.status import amend_failure
from regimen.trainer.targets.allow_list import TargetError, allow, locate

# Exit codes after which a restart may help: an unexpected error, a lost process, out of memory.
_RETRYABLE = (1, 6, 8)
_STOPPED = (130, 143)
# torch's launcher kills processes that hang 30 seconds after the first failure. A process that a
# signal ended within this time was killed by somebody else, and may be the cause of the failure.
_GRACE_SECONDS = 20


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


class RankFiles:
    """The folder through which a launcher and its processes tell each other what happens.

    It holds the request, a file for each process, and three files that tell something by existing.
    `stopping`: a signal arrived, and starting processes exit. `finished`: the run ended without a
    failure. `run_dir`: holds the path of the run directory. Nobody else may enter the folder: torch
    unpickles what the stores in it hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.request = folder / "request"
        self.run_dir = folder / "run_dir"
        self.stopping = folder / "stop"
        self.finished = folder / "finished"
        self.launcher_store = folder / "launcher.store"  # torch's, of the launcher alone
        self.store = folder / "processes.store"  # of the processes, through all restarts

    def write_rank(self, rank: int, failure: Failure | None = None) -> None:
        """Write the id of this process, and how it failed; replaces that of an earlier attempt."""
        record = {"pid": os.getpid(), "failure": failure and asdict(failure)}
        write_json(self.folder / f"rank-{rank}", record)

    def read_ranks(self) -> list[dict[str, Any]]:
        """Return what the processes have written."""
        return [json.loads(path.read_text()) for path in self.folder.glob("rank-*")]


def runner_for(request: RunRequest, note: Path | None = None) -> Callable[[RunRequest], int]:
    """Return the function that runs a request: `launch` where the strategy needs processes.

    `note`: the file for the path of the run directory.
    """
    is_single_process = request.config["dry_run"] or "RANK" in os.environ
    if not is_single_process and _starts_processes(request.config["strategy"]["_target_"]):
        return launch
    with importing():
        if request.prediction is not None:
            from regimen.scripts.runs.answers import answer

            return answer
        if request.evaluation is not None:
            from regimen.scripts.runs.measure import measure

            return measure
        from regimen.scripts.runs.run import run
    return partial(run, note=note)


def _starts_processes(target: str) -> bool:
    """Return whether the class of a strategy starts processes; a wrong one is named later."""
    with importing(), suppress(TargetError):
        return hasattr(locate(target), "launch_options")
    return False


def launch(request: RunRequest) -> int:
    """Run a request in `strategy.devices` processes and return the run's exit code.

    Raises ResourceError if the machine cannot run them, ConfigError for a configuration error that
    a process found.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from regimen.trainer.targets.instantiate import CheckedNode

    arguments = dict(request.config["strategy"])
    strategy = locate(arguments.pop("_target_"))
    # The processes check all nodes. This one says how many processes there are to start.
    raise_problems(CheckedNode(request.config["strategy"], "strategy").problems)
    raise_problems(strategy.problems(**arguments))
    processes, max_restarts = strategy.launch_options(**arguments)
    # Unlike torchrun, which sets 1: the processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # torch would print the failure too; `_report_failure` does so once.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    files = RankFiles(Path(tempfile.mkdtemp(prefix="regimen-")))  # of mode 0700
    # Nothing listens on the network: the launcher's store is a file, and it opens no server for the
    # processes, which meet in a file of theirs.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(files.launcher_store),
        # Each heartbeat lengthens the file by 1 KB, and only other launchers would need it.
        rdzv_configs={"store_type": "file", "keep_alive_interval": 600},
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(files.folder)),
        # Regimen forwards the signals that end a run itself, without torch's timeout.
        signals_to_handle="SIGQUIT",
    )
    failures = dict[int, Any]()
    try:
        files.request.write_text(json.dumps({"request": asdict(request), "path": sys.path}))
        # -P: a file `regimen.py` in the working directory would hide the package.
        command = ("-P", "-m", "regimen.scripts.runs.launch", str(os.getpid()), str(files.folder))
        with handling(_forward_signals(files)):
            try:
                elastic_launch(options, sys.executable)(*command)
            except (ChildFailedError, SignalException) as error:
                failures = getattr(error, "failures", failures)
            else:
                if files.finished.exists():
                    return 0
        return _report_failure(first_failure(failures, processes, files), request, files)
    finally:
        shutil.rmtree(files.folder, ignore_errors=True)


def _forward_signals(files: RankFiles) -> Handler:
    """Forward signals to the processes, which have their own sessions; a second Ctrl-C kills."""

    def send(kill: Callable[[int, int], None], number: int) -> None:
        for process in files.read_ranks():
            with suppress(ProcessLookupError):
                kill(process["pid"], number)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and files.stopping.exists():
            send(os.killpg, signal.SIGKILL)
            shutil.rmtree(files.folder, ignore_errors=True)
            leave_after_second_interrupt()
        files.stopping.touch()
        send(os.kill, number)

    return handle


def first_failure(failures: Mapping[int, Any], processes: int, files: RankFiles) -> Failure:
    """Return the failure that caused the others; `failures`: torch's of processes, by rank."""
    is_stopping = files.stopping.exists()
    written = [record["failure"] for record in files.read_ranks()]
    reported = [Failure(**fields) for fields in written if fields]
    if failures and not is_stopping:
        # torch's launcher stopped these processes, since another one had failed.
        reported = [failure for failure in reported if failure.code not in _STOPPED]

    first = min(reported, key=lambda failure: (failure.by_peer, failure.time), default=None)
    if first is not None and not first.by_peer:
        return first
    killed = _describe_killed(failures)
    if killed is not None:
        return Failure(0, PeerError.exit_code, killed)
    if is_stopping:
        return Failure(0, 143, "stopped before the processes had started")
    silent = set(range(processes)) - {failure.rank for failure in reported}
    if first is not None and (first.unanswered or not silent):
        return first
    rank = min(silent, default=0)
    return Failure(0, PeerError.exit_code, f"process {rank} left before the run was over")


def _describe_killed(failures: Mapping[int, Any]) -> str | None:
    """Describe the first process that a signal ended, unless torch's launcher sent the signal."""
    in_order = sorted(failures.items(), key=lambda pair: pair[1].timestamp)
    for rank, failure in in_order:
        is_early = failure.timestamp < in_order[0][1].timestamp + _GRACE_SECONDS
        if failure.exitcode < 0 and is_early:
            name = signal_name(-failure.exitcode)
            why = ", often for lack of memory" if name == "SIGKILL" else ""
            return f"process {rank} (pid {failure.pid}) was killed by {name}{why}"
    return None


def _report_failure(failure: Failure, request: RunRequest, files: RankFiles) -> int:
    """Report the first failure and return its exit code. Raises ConfigError if it was one."""
    hint = ""
    if files.run_dir.exists():
        run_dir = Path(files.run_dir.read_text())
        command = request.resume_command(run_dir)
        amend_failure(run_dir, failure.code, failure.text, command)
        if failure.code == PeerError.exit_code:
            hint = f"; go on with: {command}"
    if failure.problems:
        raise ConfigError(Problem(**fields) for fields in failure.problems)
    print_error(failure.text + hint, failure.traceback if failure.code == 1 else "")
    return failure.code


def main() -> None:
    """Run one process's part of a run; a failure is reported in the folder of the launcher."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before this process could ask for that
        leave_at_once(PeerError.exit_code)
    set_up()
    files = RankFiles(Path(sys.argv[2]))
    rank = int(os.environ["RANK"])
    log_to_stderr(rank == 0)
    code = 0
    try:
        files.write_rank(rank)
        if not files.stopping.exists():
            code = _run(files)
            if rank == 0:
                files.finished.touch()
    except BaseException as error:
        code = _write_failure(error, rank, files)
    if code:  # without waiting for threads that wait for other processes
        sys.stdout.flush()
        sys.stderr.flush()
        leave_at_once(code)
    end_process(0)


def _run(files: RankFiles) -> int:
    """Run the request of the launcher in this process."""
    content = json.loads(files.request.read_text())
    sys.path[:] = content["path"]
    request = RunRequest(**content["request"])
    allow(request.allowed)
    allow_remote_code(request.allows_remote_code)
    allow_protocols(request.overrides)
    with importing():
        from regimen.trainer.distributed import STORE
    os.environ[STORE] = str(files.store)
    return runner_for(request, files.run_dir)(request)


def _write_failure(error: BaseException, rank: int, files: RankFiles) -> int:
    """Write how this process failed; return 0 if the launcher must not restart the processes."""
    code = exit_code(error)
    failure = Failure(
        rank=rank,
        code=code,
        text=describe(error),
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        by_peer=isinstance(error, PeerError),
        unanswered=isinstance(error, SilentPeerError),
        problems=[asdict(p) for p in error.problems] if isinstance(error, ConfigError) else (),
    )
    files.write_rank(rank, failure)
    may_restart = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    if code in _STOPPED or files.stopping.exists() or (may_restart and code not in _RETRYABLE):
        return 0
    return code


if __name__ == "__main__":
    main()
