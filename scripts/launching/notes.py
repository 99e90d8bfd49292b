"""The folder in which a launcher and its processes exchange files."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from conf.errors import ConfigError
from scripts.cli.request import Request


@dataclass(frozen=True, slots=True)
class FailureReport:
    """How a process failed."""

    rank: int
    code: int
    text: str
    time: float
    traceback: str
    by_peer: bool = False  # another process's failure was the cause
    unanswered: bool = False  # another process did not answer
    problems: Sequence[Mapping[str, Any]] = ()  # the fields of each problem of a ConfigError

    @classmethod
    def of(cls, error: BaseException, **fields: Any) -> Self:
        """Describe an exception."""
        found = error.problems if isinstance(error, ConfigError) else ()
        return cls(
            traceback="".join(traceback.format_exception(error)),
            problems=[asdict(problem) for problem in found],
            **fields,
        )


class LaunchNotes:
    """Messages as files, which are written atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run_dir"

    def ask(self, request: Request, path: list[str]) -> None:
        """Write the request and `sys.path` for the processes."""
        self._write("request", {"request": asdict(request), "path": path})

    def asked(self) -> tuple[Request, list[str]]:
        """Return what `ask` wrote."""
        content = json.loads((self.folder / "request").read_text())
        return Request(**content["request"]), content["path"]

    def sign_in(self, rank: int) -> None:
        """Write the process id of a rank."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def pids(self) -> list[int]:
        """Return the process ids of the ranks of the latest attempt."""
        return [json.loads(path.read_text()) for path in self.folder.glob("rank-*.pid")]

    def stop(self) -> None:
        """Record that a signal arrived, so that starting processes exit."""
        self._write("stop", True)

    def stopping(self) -> bool:
        """Return whether a signal arrived."""
        return (self.folder / "stop").exists()

    def finish(self) -> None:
        """Record that the run has ended without a failure."""
        self._write("finished", True)

    def finished(self) -> bool:
        """Return whether `finish` was called."""
        return (self.folder / "finished").exists()

    def report(self, report: FailureReport) -> None:
        """Write how this process failed."""
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._write(f"report-{attempt}-{report.rank}", asdict(report))

    def reports(self) -> list[FailureReport]:
        """Return the reports of the latest attempt that has any, by time with causes first."""
        found: dict[int, list[FailureReport]] = {}
        for path in self.folder.glob("report-*-*"):
            attempt = int(path.name.split("-")[1])
            found.setdefault(attempt, []).append(FailureReport(**json.loads(path.read_text())))
        latest = found[max(found)] if found else []
        return sorted(latest, key=lambda report: (report.by_peer, report.time))

    def _write(self, name: str, content: Any) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)
