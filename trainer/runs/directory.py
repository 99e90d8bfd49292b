"""The run directory: its files, its status, and the one process that may write to it.

The manifest names code, versions and machine; no environment variable is recorded.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml

from regimen.conf.layout import ROOT, installed_from, installed_version, is_checkout
from regimen.trainer.files.atomic import remove_orphans, storing, write_json, write_text
from regimen.trainer.files.names import ForeignNameError, links_out, path_below
from regimen.trainer.runs.lock import LOCK_FILE, Holder, RunLock, is_held, read_holder, refuse_taken
from regimen.trainer.runs.status import (
    CHECKPOINTS,
    INFERENCE,
    LOG,
    MANIFEST,
    METRICS,
    STATUS,
    TENSORBOARD,
    Record,
    RunDirectoryError,
    holds_run,
    read_json,
    seconds_of,
)

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
_TRACKER_FOLDERS = ("trackers", "wandb", "csv")  # written by callbacks/trackers
_FILES = (CONFIG, OVERRIDES, LOG, METRICS, INFERENCE, STATUS)  # beside the manifest
_FOLDERS = (TENSORBOARD, CHECKPOINTS, *_TRACKER_FOLDERS)
_WANDB_LOG = "wandb/*/logs/debug-core.log"
# Written by callbacks and commands after the start.
_LATER = "abandoned exports evaluation.json lr_finder.json plan.txt profile.txt"
RUN_FILES = (MANIFEST, *_FILES, *_FOLDERS, *_LATER.split())  # all names in a run directory
_DISTRIBUTIONS = (
    "torch-regimen torch torchvision hydra-core omegaconf tensorboard numpy pillow scikit-learn"
)
_GIT_SECONDS = 10.0
_log = logging.getLogger(__name__)


class RunDirectory:
    """A run directory, locked by this process until `release`.

    A run exists once its `manifest.json` exists, which is written last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # user code may change the working directory
        self._created = list[Path]()  # the parents that did not exist
        self._started = now()
        self._seconds = 0.0  # of training, in earlier processes of the run

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        config_yaml: str,
        overrides: Sequence[str],
        facts: Record,
        command: str | None = None,
    ) -> Self:
        """Create a run in `path`, with its parents, and lock it; `command` would go on with it.

        Raises RunDirectoryError if `path` holds a run, or files of others that it would overwrite,
        or another process has locked it; StorageError if it cannot be written.
        """
        run = cls(path)
        if not is_held(path):  # before anything is created, so that a refusal leaves nothing behind
            refuse_existing(run.path)
        run._created = make_folder(run.path)
        with run._lock_held():
            refuse_existing(run.path)
            remove_orphans(run.path)
            run.configure(config_yaml, overrides)
            run._write_status("running", resume=command)
            start = start_record(facts)
            # Last: the run exists from here on.
            write_json(run.path / MANIFEST, {"created": start["started"], **start, "resumed": []})
        return run

    @classmethod
    def resume(cls, path: Path, *, facts: Record, command: str | None = None) -> Self:
        """Continue the run in `path` and lock it. Raises like `create`."""
        if not holds_run(path):
            raise RunDirectoryError(f"{path} holds no run: it has no {MANIFEST}")
        run = cls(path)
        with run._lock_held():
            for folder in (run.path, run.path / CHECKPOINTS):
                remove_orphans(folder)
            try:
                manifest = run.manifest()
            except RunDirectoryError as error:
                _log.warning("warning: %s: the records of the run's earlier starts are lost", error)
                manifest = {}
            with contextlib.suppress(RunDirectoryError):
                run._seconds = seconds_of(read_json(run.path / STATUS))
            resumed = [*manifest.get("resumed", []), start_record(facts)]
            current = {"tags": facts.get("tags", []), "resumed": resumed, "exit": None}
            write_json(run.path / MANIFEST, {**manifest, **current})
            run._write_status("running", resume=command)
        return run

    def manifest(self) -> Record:
        """Read the manifest. Raises RunDirectoryError if it is damaged."""
        return read_json(self.path / MANIFEST)

    def update_manifest(self, facts: Record) -> None:
        """Replace the named top-level entries of the manifest."""
        write_json(self.path / MANIFEST, {**self.manifest(), **facts})

    def finish(
        self,
        state: str,
        *,
        code: int = 0,
        reason: str | None = None,
        resume: str | None = None,
        results: Mapping[str, float] | None = None,
        best: Record | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Record the end in `status.json` and the manifest.

        `state` is finished, pruned, stopped, preempted or failed; `resume` is the command that
        continues the run; `best` is metric, value and step of the best checkpoint; `seconds` is the
        time this process trained, which is added to that of those before it. Raises StorageError.
        """
        refuse_taken(self.path)
        end: Record = {"state": state, "code": code, "reason": reason}
        self._seconds += seconds
        values = {name: float(value) for name, value in (results or {}).items()}
        self._write_status(**end, resume=resume, results=values, best=best)
        self.update_manifest({"exit": {**end, "ended": now()}})

    def discard(self) -> None:
        """Undo `create` for a run that was refused before it began; other files stay."""
        (self.path / MANIFEST).unlink(missing_ok=True)  # first: without it there is no run
        for name in (*_FILES, LOCK_FILE):
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty
            for folder in (self.path, *self._created):
                folder.rmdir()
        self.release()

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    @contextlib.contextmanager
    def _lock_held(self) -> Iterator[None]:
        """Acquire the lock, and release it if the block fails."""
        refuse_links(self.path)
        self._lock = locked(self.path)
        try:
            yield
        except BaseException:
            self.release()
            raise

    def configure(self, config_yaml: str, overrides: Sequence[str]) -> None:
        """Write the configuration, and the command line's overrides, unless it is unchanged."""
        path = self.path / CONFIG
        if not (path.is_file() and path.read_bytes() == config_yaml.encode()):
            write_text(self.path / OVERRIDES, yaml.safe_dump(list(overrides), allow_unicode=True))
            write_text(path, config_yaml)

    def _write_status(self, state: str, **fields: Any) -> None:
        status: Record = {
            "state": state,
            **dict.fromkeys(("code", "reason", "resume")),
            "results": {},
            "best": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": now(),
            "seconds": self._seconds,
        }
        write_json(self.path / STATUS, {**status, **fields})


def refuse_existing(folder: Path) -> None:
    """Raise RunDirectoryError if a folder holds a run, or files that one would replace."""
    if holds_run(folder):
        raise RunDirectoryError(
            "run_dir",
            f"{folder} already holds a run",
            "continue it with resume=auto, or choose another run_dir",
        )
    names = [name for name in (*_FILES, *_FOLDERS) if os.path.lexists(folder / name)]
    # A lock without a manifest is of a run that was killed while it was created.
    if names and not (folder / LOCK_FILE).exists():
        raise RunDirectoryError(
            "run_dir",
            f"{folder} holds {', '.join(names)}, and no run: they would be overwritten",
            "choose another run_dir",
        )


def refuse_held(folder: Path) -> None:
    """Raise RunDirectoryError if another process holds a folder."""
    if is_held(folder):
        raise _in_use(folder, read_holder(folder))


def _in_use(folder: Path, holder: Holder | None) -> RunDirectoryError:
    return RunDirectoryError("run_dir", f"{folder} is in use by {holder}", "choose another run_dir")


def link_out(folder: Path) -> Path | None:
    """Return a link below a run or a sweep that leads out of it; None if there is none.

    The run would change the file that it leads to, or show a private one to whoever gets the run.
    """
    # W&B links the log of its own process, which nobody reads there.
    links = (link for link in links_out(folder) if not link.match(_WANDB_LOG))
    return next(links, None)


def refuse_links(folder: Path, key: str = "run_dir") -> None:
    """Raise RunDirectoryError where a link below a run or a sweep leads out of it."""
    link = link_out(folder)
    if link is not None:
        raise RunDirectoryError(key, f"{link} is a link that leads out of {folder}", "remove it")


def locked(folder: Path) -> RunLock:
    """Lock a folder. Raises RunDirectoryError if another process holds it, StorageError."""
    lock = RunLock(folder)
    holder = lock.acquire()
    if holder is not None:
        raise _in_use(folder, holder)
    return lock


def name_folder(root: Path, name: str) -> Path:
    """Return `root/name`. Raises RunDirectoryError for a name that leads out of `root`."""
    try:
        folder = path_below(root, name)
    except ForeignNameError as error:
        raise RunDirectoryError("name", str(error)) from error
    if any(len(os.fsencode(part)) > 200 for part in name.split("/")):
        raise RunDirectoryError("name", f"{name[:60]!r} is not a valid folder name below {root}")
    return folder


def timestamp() -> str:
    """Return the local time, formatted as the name of a run."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def reserve(folder: Path, stamp: str) -> Path:
    """Create `folder/stamp`, or the next free one of `stamp-2`, `stamp-3`, ..."""
    path = folder / stamp
    number = 1
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1
            path = folder / f"{stamp}-{number}"


def make_folder(path: Path) -> list[Path]:
    """Make a run directory and its parents; return the parents that were missing, inner ones first.

    Raises StorageError.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    with storing(path):
        path.mkdir(parents=True, exist_ok=True)
    return missing


def now() -> str:
    """Return the time in UTC, as in `2026-11-21T12:00:00.000000+00:00`; sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def start_record(facts: Record) -> Record:
    """Describe one start of a run: process, code, versions, machine, and the caller's `facts`."""
    return {
        "started": now(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "code": code_record(ROOT) if is_checkout() else installed_record(),
        "working_folder": code_record(Path.cwd()),
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **facts,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries without importing them.

    As of the first call: a process imports a library once.
    """
    installed = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def code_record(folder: Path) -> Record:
    """Return `folder`, its git commit and a hash of its uncommitted changes, if there are any.

    The URLs of remotes are not recorded: they can contain access tokens.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"path": str(folder), "commit": None}
    changed = (_git(folder, "status", "--porcelain", "--untracked-files=no") or b"").splitlines()
    difference = _git(folder, "diff", "HEAD") or b""
    return {
        "path": str(folder),
        "commit": commit.decode().strip(),
        "changed_files": [os.fsdecode(line[3:]) for line in changed],
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def installed_record() -> Record:
    """Return where the installed copy lies, its version, and its commit if it came from git.

    `git` is not run: the folder may lie in somebody else's repository. The URL is not recorded.
    """
    vcs = installed_from().get("vcs_info") or {}
    return {"path": str(ROOT), "version": installed_version(), "commit": vcs.get("commit_id")}


def _git(folder: Path, *arguments: str) -> bytes | None:
    # With optional locks `git status` would write to the user's index.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None
