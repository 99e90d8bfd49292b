"""Read the status of runs without locking them, and find the run to resume."""

import contextlib
import json
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError
from trainer.errors import RunError
from trainer.files.atomic import regular, storing, write_json
from trainer.runs.lock import is_held

MANIFEST = "manifest.json"
INFERENCE = "inference.json"
STATUS = "status.json"
ENDED_WELL = ("finished", "pruned")  # states of runs that are not gone on with
LOG, METRICS, CHECKPOINTS = "train.log", "metrics.jsonl", "checkpoints"
TENSORBOARD = "tensorboard"
SWEEP = "sweep.json"  # in the folder of a sweep: what varies in it
Record = dict[str, Any]  # plain values by name, as a JSON file holds them
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where it is


class RunDirectoryError(ConfigError, RunError):
    """A run directory cannot be used: its name is invalid, it is locked, or it holds a run."""


def check_run_dir(path: Path) -> None:
    """Validate the path of a run directory before it is read.

    Raises RunDirectoryError for the root of the file system, a file or a link that leads to no
    folder, StorageError for a path that the operating system does not accept.
    """
    with storing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a new one
        os.lstat(path)
    if os.path.realpath(path) == os.path.realpath(os.sep):
        hint = "choose a directory for this run alone"
        raise RunDirectoryError("run_dir", f"{path} is the root of the file system", hint)
    for place in (path, *path.parents):  # of which those that are missing are made
        if os.path.lexists(place) and not place.is_dir():  # a link that leads nowhere is none
            raise RunDirectoryError("run_dir", f"{place} is no folder", "choose another")


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
    """Return the seconds that a status tells of; 0.0 where it tells of none."""
    seconds = status.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def amend_failure(path: Path, code: int, reason: str, resume: str) -> None:
    """Replace code and reason in the status of a failed run by those of the first failure."""
    if status := read_json(path / STATUS):
        state = "preempted" if code in (130, 143) else "failed"
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

    for path in sorted(filter(holds_run, sorted(folder.iterdir())), key=created)[::-1]:
        with contextlib.suppress(RunDirectoryError):  # damaged: its checkpoint decides
            if read_status(path).get("state") in ENDED_WELL:
                continue
        if not is_held(path):
            return path
    return None


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return int(text) if text.lstrip("-").isdecimal() else value


def read_json(path: Path) -> Record:
    """Read a JSON object; {} for a missing file. Raises RunDirectoryError."""
    try:
        text = regular(path).read_text("utf-8")
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"cannot read {path}: it does not contain a JSON object")
    return value


def own_values(text: str) -> Any:
    """Return the values of a YAML text that Regimen wrote itself."""
    return yaml.load(text, Loader=_LOADER)


def read_own(path: Path) -> Any:
    """Return the values of a YAML file that Regimen wrote itself. Raises what reading it raises."""
    return own_values(path.read_text("utf-8"))


def read_metrics(run_dir: Path, last_bytes: int | None = None) -> Iterator[Record]:
    """Yield the lines of a run's log, the oldest first; nothing where there is no log.

    Incomplete lines, which a kill leaves, are skipped. last_bytes: read only the end of the file.
    """
    try:
        with regular(run_dir / METRICS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 0 if last_bytes is None else max(0, size - last_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")[bool(start) : -1]  # the ends may be incomplete
    except OSError:
        return
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values


def command(run_dir: Path) -> str:
    """Return the command that serves a run to this machine only.

    For a job of a sweep it is the sweep's, which shows the job by what varies in it.
    """
    folder = run_dir.parent if (run_dir.parent / SWEEP).exists() else run_dir
    return f"tensorboard --logdir {shlex.quote(str(folder / TENSORBOARD))}"
