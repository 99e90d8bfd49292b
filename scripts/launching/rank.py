"""One of the processes that `launch` starts: `python -m scripts.launching.rank FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from scripts.cli.console import (
    describe,
    end_on_signals,
    end_with_parent,
    exit_code,
    importing,
    keep_freed_memory,
    log_to_stderr,
)
from scripts.cli.deferred import defer_imports
from scripts.cli.others import quiet_others
from scripts.cli.outlets import outlive_readers
from scripts.cli.request import Request
from scripts.launching.notes import FailureReport, LaunchNotes

# Exit codes after which a restart may help: an unexpected error, a lost process, out of memory.
_MENDABLE = (1, 6, 8)
_STOPPED = (130, 143)


def main() -> None:
    """Run this process's part of a run; a failure is reported in the folder of the launcher."""
    end_with_parent(signal.SIGKILL)
    keep_freed_memory()
    defer_imports()
    outlive_readers()
    quiet_others()
    end_on_signals()
    notes = LaunchNotes(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    log_to_stderr(rank == 0)
    try:
        notes.sign_in(rank)
        if notes.stopping():
            code = 0
        else:
            request, sys.path[:] = notes.asked()
            code = _work(request, notes)
    except BaseException as error:
        code = _fail(error, rank, notes)
    _leave(code)


def _work(request: Request, notes: LaunchNotes) -> int:
    with importing():
        from scripts.prediction.work import answer
        from scripts.runs.run import run

    predicts = request.prediction is not None
    code = answer(request) if predicts else run(request, notes.run_dir)
    if os.environ["RANK"] == "0":
        notes.finish()
    return code


def _fail(error: BaseException, rank: int, notes: LaunchNotes) -> int:
    """Report an exception; return 0 if the launcher must not restart the processes."""
    from trainer.errors import PeerError, SilentPeerError

    code = exit_code(error)
    notes.report(
        FailureReport.of(
            error,
            rank=rank,
            code=code,
            text=describe(error),
            time=time.time(),
            by_peer=isinstance(error, PeerError),
            unanswered=isinstance(error, SilentPeerError),
        )
    )
    restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    hopeless = restarts and code not in _MENDABLE
    return 0 if code in _STOPPED or notes.stopping() or hopeless else code


def _leave(code: int) -> None:
    """Exit without waiting for threads that wait for other processes."""
    from trainer.errors import leave_at_once

    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        leave_at_once(code)
    sys.exit(0)


if __name__ == "__main__":
    main()
