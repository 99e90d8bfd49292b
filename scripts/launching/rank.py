"""One of the processes that `launch` starts (`python -m scripts.launching.rank FOLDER`), and the
folder through which they tell each other what happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from scripts.cli.console import describe, exit_code, importing, log_to_stderr, set_up
from scripts.cli.request import Request
from scripts.cli.signals import end_with_parent

# Exit codes after which a restart may help: an unexpected error, a lost process, out of memory.
_MENDABLE = (1, 6, 8)
STOPPED = (130, 143)


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
    failure. `run_dir` holds the path of the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir, self.stopping, self.finished = (
            folder / name for name in ("run_dir", "stop", "finished")
        )

    def write(self, name: str, content: Any) -> None:
        """Write a file as JSON, whole at every moment."""
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)

    def sign(self, rank: int, failure: Failure | None = None) -> None:
        """Tell the id of this process, and how it failed; in place of an earlier attempt's."""
        self.write(f"rank-{rank}", {"pid": os.getpid(), "failure": failure and asdict(failure)})

    def signed(self) -> list[dict[str, Any]]:
        """Return what the processes have told."""
        return [json.loads(path.read_text()) for path in self.folder.glob("rank-*")]


def main() -> None:
    """Run this process's part of a run; a failure is reported in the folder of the launcher."""
    end_with_parent(signal.SIGKILL)
    set_up()
    notes, rank = Notes(Path(sys.argv[1])), int(os.environ["RANK"])
    log_to_stderr(rank == 0)
    code = 0
    try:
        notes.sign(rank)
        if not notes.stopping.exists():
            code = _work(notes, rank)
    except BaseException as error:
        code = _fail(error, rank, notes)
    from trainer.errors import leave_at_once

    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # without waiting for threads that wait for other processes
        leave_at_once(code)
    sys.exit(0)


def _work(notes: Notes, rank: int) -> int:
    asked = json.loads((notes.folder / "request").read_text())
    sys.path[:] = asked["path"]
    request = Request(**asked["request"])
    with importing():
        from scripts.prediction.work import answer
        from scripts.runs.run import run

    predicts = request.prediction is not None
    code = answer(request) if predicts else run(request, notes.run_dir)
    if rank == 0:
        notes.finished.touch()
    return code


def _fail(error: BaseException, rank: int, notes: Notes) -> int:
    """Report an exception; return 0 if the launcher must not restart the processes."""
    from trainer.errors import PeerError, SilentPeerError

    code = exit_code(error)
    failure = Failure(
        rank,
        code,
        describe(error),
        time.time(),
        "".join(traceback.format_exception(error)),
        isinstance(error, PeerError),
        isinstance(error, SilentPeerError),
        [asdict(p) for p in error.problems] if isinstance(error, ConfigError) else (),
    )
    notes.sign(rank, failure)
    restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    hopeless = restarts and code not in _MENDABLE
    return 0 if code in STOPPED or notes.stopping.exists() or hopeless else code


if __name__ == "__main__":
    main()
