"""The folder of a sweep: which one to go on with, and which job each folder in it holds."""

import csv
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError, Problem
from scripts.composition.identity import belongs_outside, identity
from scripts.sweeps.leaderboard import FILE
from trainer.files.own_yaml import own_values
from trainer.runs.directory import CONFIG, OVERRIDES, name_folder, reserve, timestamp
from trainer.runs.lock import RunLock, is_held
from trainer.runs.status import (
    ENDED_WELL,
    RunDirectoryError,
    check_run_dir,
    holds_run,
    read_status,
)

RUNS = Path("runs")
_STAMP = len(timestamp())  # a number follows for a sweep that began in the same second


def find_sweep(config: dict[str, Any]) -> Path | None:
    """Return the sweep to go on with; None for a new one. Makes nothing."""
    if config["run_dir"] is None:
        resumed = config["resume"] == "auto"
        return newest_unfinished(_sweeps(config)) if resumed else None
    folder = Path(config["run_dir"])
    check_run_dir(folder)
    used = (folder / FILE).exists() or holds_run(folder / "0")
    if holds_run(folder) or (used and config["resume"] is None):
        message = f"{folder} holds a run or a sweep already"
        hint = "resume=auto goes on with it" if used else "choose another run_dir"
        raise ConfigError([Problem("run_dir", message, hint=hint)])
    return folder if used else None


def newest_unfinished(sweeps: Path) -> Path | None:
    """Return the newest sweep in a folder with an unfinished job that no process holds."""
    boards = sorted(sweeps.glob(f"*/{FILE}"), key=_age, reverse=True)
    found = (b.parent for b in boards if not _all_finished(b) and not is_held(b.parent))
    return next(found, None)


def _age(board: Path) -> tuple[str, int, str]:
    name = board.parent.name
    return name[:_STAMP], len(name), name  # -10 comes after -9


def _all_finished(board: Path) -> bool:
    try:
        with board.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
    except (OSError, ValueError):  # unreadable: the status of each job decides
        return False
    return all(row[1] in ENDED_WELL for row in rows if len(row) > 1)


def hold_folder(config: dict[str, Any], found: Path | None) -> tuple[Path, RunLock]:
    """Make the folder of a new sweep if none was found, and lock it.

    Raises ConfigError if it cannot be made, RunDirectoryError if another process holds it.
    """
    folder = found or _make_folder(config)
    lock = RunLock(folder)
    holder = lock.acquire()
    if holder is not None:
        message = f"the sweep in {folder} is in use by {holder}"
        raise RunDirectoryError(Problem("run_dir", message, "choose another run_dir"))
    return folder, lock


def _make_folder(config: dict[str, Any]) -> Path:
    if config["run_dir"] is None:
        return reserve(_sweeps(config), timestamp())
    folder = Path(config["run_dir"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run_dir", f"{folder}: {error.strerror}")]) from error
    return folder


def _sweeps(config: dict[str, Any]) -> Path:
    return name_folder(RUNS, config["name"]) / "sweeps"


def job_folders(sweep: Path) -> dict[tuple[str, ...], Path]:
    """Return the folder of each job, by the overrides that it was made with."""
    numbered = [path for path in sweep.iterdir() if path.name.isdecimal()]
    folders: dict[tuple[str, ...], Path] = {}
    for path in sorted(numbered, key=lambda path: int(path.name)):
        try:
            texts = own_values((path / OVERRIDES).read_text(encoding="utf-8"))
            folders.setdefault(identity(map(str, texts)), path)
        except (OSError, ValueError, TypeError, yaml.YAMLError, ConfigError):
            continue  # the folder of no known job
    return folders


def has_finished(job: Path, config: dict[str, Any]) -> bool:
    """Return whether a job has finished with exactly this configuration."""
    try:
        if read_status(job).get("state") not in ENDED_WELL:
            return False
        saved = own_values((job / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RunDirectoryError):
        return False
    return isinstance(saved, dict) and _trained(saved) == _trained(config)


def _trained(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if not belongs_outside(k) and k != "dry_run"}
