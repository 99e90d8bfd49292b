"""Read the status of runs without locking them, and find the run to resume."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regimen.conf.errors import ConfigError
from regimen.conf.json_text import plain_json
from regimen.conf.yaml_file import plain_values
from regimen.trainer.errors import EXIT_CODES, RunError
from regimen.trainer.files.atomic import regular, storing, write_json
from regimen.trainer.runs.lock import is_held

MANIFEST = "manifest.json"
INFERENCE = "inference.json"
STATUS = "status.json"
ENDED_WELL = ("finished", "pruned")  # states of runs that are not continued
LOG = "train.log"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
_MAX_SECONDS = 1e10  # centuries: a damaged file
SWEEP = "sweep.json"  # in the folder of a sweep: what varies in it
Record = dict[str, Any]  # plain values by name, as a JSON file holds them


class RunDirectoryError(ConfigError, RunError):
    """A run directory cannot be used: its name is invalid, it is locked, or it holds a run."""


def check_run_dir(path: Path) -> None:
    """Validate the path of a run directory before it is read.

    Raises RunDirectoryError for the root of the file system, a file or a link that leads to no
    folder, StorageError for a path that the operating system does not accept.
    """
    with storing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a new run
        os.lstat(path)
    if os.path.realpath(path) == os.path.realpath(os.sep):
        raise RunDirectoryError(
            "run_dir",
            f"{path} is the root of the file system",
            "choose a directory for this run alone",
        )
    for folder in (path, *path.parents):  # missing ones will be created
        if os.path.lexists(folder) and not folder.is_dir():  # also a link to nothing
            raise RunDirectoryError("run_dir", f"{folder} is no folder", "choose another")


def holds_run(path: Path) -> bool:
    """Return whether a run exists in `path`."""
    return (path / MANIFEST).is_file()


def read_status(path: Path) -> Record:
    """Read the status of the run in `path`; `running` becomes `killed` if its process is dead."""
    status = read_json(path / STATUS)
    if status.get("state") == "running" and not is_held(path):
        status["state"] = "killed"
    return status


def seconds_of(status: Record) -> float:
    """Return the seconds of training in a status; 0.0 if they are missing or impossible."""
    seconds = status.get("seconds")
    if isinstance(seconds, int | float) and 0 <= seconds < _MAX_SECONDS:
        return float(seconds)
    return 0.0


def amend_failure(path: Path, code: int, reason: str, resume: str) -> None:
    """Replace code and reason in the status of a failed run by those of the first failure."""
    status = read_json(path / STATUS)
    if status:
        state = "preempted" if code in EXIT_CODES.values() else "failed"
        end = {"state": state, "code": code, "reason": reason, "resume": resume}
        write_json(path / STATUS, {**status, **end})


def find_unfinished(folder: Path) -> Path | None:
    """Return the newest run directly in `folder` that is neither finished nor locked."""
    if not folder.is_dir():
        return None

    def created(path: Path) -> str:
        with contextlib.suppress(RunDirectoryError):
            return str(read_json(path / MANIFEST).get("created", ""))
        return ""

    # Sorted by name first: it decides between runs of equal or unreadable times.
    runs = filter(holds_run, sorted(folder.iterdir(), reverse=True))
    for path in sorted(runs, key=created, reverse=True):
        with contextlib.suppress(RunDirectoryError):  # damaged: its checkpoint decides
            if read_status(path).get("state") in ENDED_WELL:
                continue
        if not is_held(path):
            return path
    return None


def read_json(path: Path) -> Record:
    """Read a JSON object; {} for a missing file. Raises RunDirectoryError."""
    try:
        value = plain_json(regular(path).read_bytes(), finite=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"cannot read {path}: it does not contain a JSON object")
    return value


def read_run_yaml(path: Path) -> Any:
    """Return the values of a YAML file of a run: a section, or a list.

    Regimen wrote it, though perhaps somewhere else, where somebody changed it. Raises OSError,
    UnicodeDecodeError, and ConfigError for what is dangerous or broken.
    """
    return plain_values(regular(path).read_text("utf-8"), str(path), lists=True)


def read_metrics(run_dir: Path, last_bytes: int | None = None) -> Iterator[Record]:
    """Yield the lines of a run's log, the oldest first; nothing where there is no log.

    Incomplete lines, which a kill leaves, are skipped. last_bytes: read only the end of the file.
    """
    try:
        with regular(run_dir / METRICS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 0 if last_bytes is None else max(0, size - last_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]  # the last one is empty or incomplete
            if start:
                lines = lines[1:]  # the first one may be incomplete
    except OSError:
        return
    for line in lines:
        try:
            values = plain_json(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values


def command(run_dir: Path) -> str:
    """Return the command that shows a run in TensorBoard, on this machine only.

    For a job of a sweep it shows the sweep, whose jobs are named by what varies in them.
    """
    folder = run_dir.parent if (run_dir.parent / SWEEP).exists() else run_dir
    return f"tensorboard --logdir {shlex.quote(str(folder / TENSORBOARD))}"
