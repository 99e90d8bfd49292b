"""The folder in which a launcher and the processes that it started leave each other notes."""

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
    problems: Sequence[Mapping[str, Any]] = ()  # the fields of each, of a mistaken configuration

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
    """Files that are whole when they can be seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run_dir"

    def ask(self, request: Request, path: list[str]) -> None:
        """Leave what is to be done, and where modules are found."""
        self._write("request", {"request": asdict(request), "path": path})

    def asked(self) -> tuple[Request, list[str]]:
        """Return what `ask` left."""
        content = json.loads((self.folder / "request").read_text())
        return Request(**content["request"]), content["path"]

    def sign_in(self, rank: int) -> None:
        """Say which process a rank is."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def pids(self) -> list[int]:
        """Return the processes that have signed in, of the latest attempt."""
        return [json.loads(path.read_text()) for path in self.folder.glob("rank-*.pid")]

    def stop(self) -> None:
        """Say that a signal came: those still starting need not."""
        self._write("stop", True)

    def stopping(self) -> bool:
        """Tell whether a signal came."""
        return (self.folder / "stop").exists()

    def finish(self) -> None:
        """Say that the run is over and all is well."""
        self._write("finished", True)

    def finished(self) -> bool:
        """Tell whether `finish` was called."""
        return (self.folder / "finished").exists()

    def report(self, report: FailureReport) -> None:
        """Say how this process failed."""
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._write(f"report-{attempt}-{report.rank}", asdict(report))

    def reports(self) -> list[FailureReport]:
        """Return what was reported in the latest attempt that has any: causes first, by time."""
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
