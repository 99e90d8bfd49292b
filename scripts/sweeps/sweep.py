"""The folder of a sweep: which one to go on with, which job is where, and what is shown of them."""

import itertools
import os
import re
import shlex
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from conf.check import parse
from conf.errors import ConfigError, Problem, did_you_mean, raise_problems
from conf.schema import SweepConfig
from scripts.cli.arguments import PRIMARY, Arguments, quoted, run_dir_override
from scripts.cli.console import logger
from scripts.composition.identity import belongs_outside, identity
from scripts.composition.overrides import Swept
from scripts.sweeps.clusters import RayLauncher, SubmititLauncher, options_of
from scripts.sweeps.leaderboard import (
    FILE,
    Job,
    Ranking,
    read_states,
    short_keys,
    show,
    write_csv,
)
from scripts.sweeps.local import LocalLauncher
from scripts.sweeps.report import write_report
from trainer.errors import StorageError, stopping_signals
from trainer.files.atomic import write_json
from trainer.runs.directory import CONFIG, OVERRIDES, name_folder, reserve, timestamp
from trainer.runs.lock import RunLock, is_held
from trainer.runs.status import (
    ENDED_WELL,
    SWEEP,
    TENSORBOARD,
    RunDirectoryError,
    check_run_dir,
    holds_run,
    own_values,
    read_status,
)

Launcher = LocalLauncher | SubmititLauncher | RayLauncher
RUNS = Path("runs")
_STAMP = len(timestamp())  # a number follows for a sweep that began in the same second


class Sweep:
    """A folder of jobs, and how those that ran have ended.

    `config`: of the first job; it has the metric by which all are compared. `varied`: the keys that
    differ between jobs. `count`: jobs, including those that are not known yet.
    """

    def __init__(
        self, arguments: Arguments, config: dict[str, Any], varied: Sequence[str], count: int
    ) -> None:
        self.arguments, self.config, self.varied, self.count = arguments, config, varied, count
        self.settings = parse(config).sweep or SweepConfig()
        self.devices = 0  # accelerators, once they are counted
        self.metric: str | None = None  # of the task, if it is known
        self.decided = False  # whether jobs are compared by it whatever they log
        self.heard: list[int] = []  # signals that ask the sweep to end
        self.running: dict[int, Job] = {}
        self.launcher = self._launcher()
        self.group_by = self._group_keys()
        self.found = _find_sweep(config)
        self._known = job_folders(self.found) if self.found else {}
        self._planned: dict[tuple[str, ...], Job] = {}
        self._complaints: set[str] = set()  # about the leaderboard's file

    def _launcher(self) -> Launcher:
        settings = self.settings
        if settings.launcher == "local":
            return LocalLauncher(settings.jobs or 1, settings.jobs_per_device, self.devices)
        options = options_of(settings.launcher_options, self.arguments.overrides)
        return (SubmititLauncher if settings.launcher == "submitit" else RayLauncher)(options)

    def _group_keys(self) -> list[str]:
        given = self.settings.group_by
        keys = [given] if isinstance(given, str) else given or []
        there = f"there are {', '.join(self.varied)}" if self.varied else None
        raise_problems(
            Problem(
                "sweep.group_by",
                f"{key!r} does not vary between the jobs",
                did_you_mean(key, self.varied) or there,
            )
            for key in keys
            if key not in self.varied
        )
        return keys

    def knows(self, overrides: Sequence[Swept]) -> Path | None:
        """Return the folder that an earlier start gave a job."""
        return self._known.get(identity(override.text for override in overrides))

    def is_done(self, overrides: Sequence[Swept], config: dict[str, Any]) -> bool:
        """Return whether a job of an earlier start has finished."""
        folder = self.knows(overrides)
        return folder is not None and _has_finished(folder, config)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make and lock the sweep's folder, and record signals instead of ending at once.

        Raises ConfigError if it cannot be made, RunDirectoryError if another process holds it.
        """
        self.folder = self.found or _make_folder(self.config)
        lock = RunLock(self.folder)
        if (holder := lock.acquire()) is not None:
            message = f"the sweep in {self.folder} is in use by {holder}"
            raise RunDirectoryError(Problem("run_dir", message, "choose another run_dir"))
        self._taken = {path.name for path in self.folder.iterdir()}
        if self.settings.launcher == "local":
            self.launcher = self._launcher()  # the devices are counted now
        if self.found is not None:
            print(f"going on with the sweep {self.folder}", flush=True)
        write_json(self.folder / SWEEP, {"swept": list(self.varied)})
        board = shlex.quote(str(self.folder / TENSORBOARD))
        print(f"follow the sweep: tensorboard --logdir {board}", flush=True)
        before = {n: signal.signal(n, self._hear) for n in stopping_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.launcher.close()
            lock.release()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)

    def plan(self, overrides: Sequence[Swept], config: dict[str, Any]) -> Job:
        """Give a job its folder, or the next free one; the result of a finished job is read."""
        texts = [override.text for override in overrides]
        name = identity(texts)
        if name in self._planned:
            self.count -= 1
            return self._planned[name]
        free = (str(n) for n in itertools.count() if str(n) not in self._taken)
        folder = self._known.get(name) or self.folder / next(free)
        self._taken.add(folder.name)
        values = {o.key: o.value for o in overrides if not belongs_outside(o.key)}
        job = self._planned[name] = Job(int(folder.name), folder, values, texts, config)
        if _has_finished(folder, config):
            job.end(0)
        return job

    @property
    def jobs(self) -> list[Job]:
        """Return all jobs that are known so far, in the order of the grid."""
        return list(self._planned.values())

    def words(self, job: Job) -> list[str]:
        """Return the arguments of `train` for a job."""
        keys = {text: _key(text) for text in job.texts}
        kept = [t for t, k in keys.items() if not belongs_outside(k) or k == "resume_policy"]
        if holds_run(job.run_dir):
            kept.append("resume=auto")
        elif self.config["resume"] not in (None, "auto"):  # a checkpoint from which all jobs begin
            kept += [text for text, key in keys.items() if key == "resume"]
        return [*flags(self.arguments), *kept, *job.more, f"run_dir={quoted(str(job.run_dir))}"]

    @property
    def ended(self) -> bool:
        """Return whether no further job starts: after a signal, or a failure with `fail_fast`."""
        failed = any(job.failed for job in self.jobs)
        return bool(self.heard) or (self.settings.fail_fast and failed)

    @property
    def ranking(self) -> Ranking:
        """Return how the jobs compare, by what is known so far."""
        return Ranking(self.config, self.jobs, self.metric, self.decided)

    def write(self) -> None:
        """Write the leaderboard as it stands, and show the jobs in TensorBoard."""
        with suppress(OSError):  # a dashboard must not end a sweep
            link_jobs(self.folder, self.jobs, self.varied, self.running)
        try:
            write_csv(self.folder, self.ranking, self.group_by, self.count, self.running)
        except StorageError as error:  # the running jobs are not affected
            if str(error) not in self._complaints:
                logger.warning("warning: %s", error)
            self._complaints.add(str(error))

    def close(self) -> int:
        """Print the table, draw the report and return the exit code."""
        self.write()
        show(self.folder, self.ranking, self.group_by, self.varied)
        if self.settings.report and not self.heard:
            write_report(self.folder, self.ranking, self.varied)
        if self.ended:
            why = "interrupted" if self.heard else "sweep.fail_fast ended it"
            print(f"{why}; go on with the sweep: {self._resume_command()}")
        if self.heard:
            return 130 if self.heard[0] == signal.SIGINT else 143
        return next((job.code for job in self.jobs if job.code), 0)

    def _resume_command(self) -> str:
        kept = [t for t in self.arguments.overrides if _key(t) != "run_dir"]
        if self.config["resume"] in (None, "auto"):
            kept = [*(t for t in kept if _key(t) != "resume"), "resume=auto"]
        words = [*flags(self.arguments), *kept, run_dir_override(self.folder)]
        return shlex.join(["train", "-m", *words])


def flags(arguments: Arguments) -> list[str]:
    """Return the flags that a command line of ours has besides its overrides."""
    name = arguments.config_name
    pairs = [("--config-name", name)] if name != PRIMARY else []
    if arguments.config_path is not None:
        pairs.append(("--config-path", arguments.config_path))
    pairs += [("--config-dir", folder) for folder in arguments.config_dirs]
    pairs += [("--allow-target", package) for package in arguments.allow_targets]
    return [word for pair in pairs for word in pair]


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _find_sweep(config: dict[str, Any]) -> Path | None:
    if config["run_dir"] is None:
        return newest_unfinished(_sweeps(config)) if config["resume"] == "auto" else None
    folder = Path(config["run_dir"])
    check_run_dir(folder)
    used = (folder / FILE).exists() or holds_run(folder / "0")
    if holds_run(folder) or (used and config["resume"] is None):
        message = f"{folder} holds a run or a sweep already"
        hint = "resume=auto goes on with it" if used else "choose another run_dir"
        raise ConfigError([Problem("run_dir", message, hint=hint)])
    return folder if used else None


def _sweeps(config: dict[str, Any]) -> Path:
    return name_folder(RUNS, config["name"]) / "sweeps"


def newest_unfinished(sweeps: Path) -> Path | None:
    """Return the newest sweep in a folder with an unfinished job that no process holds."""

    def age(folder: Path) -> tuple[str, int, str]:
        name = folder.name
        return name[:_STAMP], len(name), name  # -10 comes after -9

    def unfinished(folder: Path) -> bool:
        try:
            return any(state not in ENDED_WELL for state in read_states(folder))
        except (OSError, ValueError):  # unreadable: the status of each job decides
            return True

    folders = (board.parent for board in sweeps.glob(f"*/{FILE}"))
    found = sorted(folders, key=age, reverse=True)
    return next((f for f in found if unfinished(f) and not is_held(f)), None)


def _make_folder(config: dict[str, Any]) -> Path:
    if config["run_dir"] is None:
        return reserve(_sweeps(config), timestamp())
    folder = Path(config["run_dir"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run_dir", f"{folder}: {error.strerror}")]) from error
    return folder


def job_folders(sweep: Path) -> dict[tuple[str, ...], Path]:
    """Return the folder of each job, by the overrides that it was made with."""
    numbered = [path for path in sweep.iterdir() if path.name.isdecimal()]
    folders: dict[tuple[str, ...], Path] = {}
    for path in sorted(numbered, key=lambda path: int(path.name)):
        # One that cannot be read is the folder of no known job.
        with suppress(OSError, ValueError, TypeError, yaml.YAMLError, ConfigError):
            texts = own_values((path / OVERRIDES).read_text(encoding="utf-8"))
            folders.setdefault(identity(map(str, texts)), path)
    return folders


def _has_finished(folder: Path, config: dict[str, Any]) -> bool:
    try:
        if read_status(folder).get("state") not in ENDED_WELL:
            return False
        saved = own_values((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RunDirectoryError):
        return False
    return isinstance(saved, dict) and _trained(saved) == _trained(config)


def _trained(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if not belongs_outside(k) and k != "dry_run"}


def link_jobs(
    sweep: Path, jobs: Sequence[Job], varied: Sequence[str], running: Collection[int] = ()
) -> None:
    """Link each job that has begun in `tensorboard/`, by what varies: `lr=0.1,seed=2`.

    Links of jobs that the grid has no more are removed. Raises OSError.
    """
    board, links = sweep / TENSORBOARD, dict[str, str]()
    for job in jobs:
        own = job.run_dir / TENSORBOARD
        if not own.is_dir() and job.number not in running:
            continue  # an open TensorBoard finds the folder of one that runs once it is there
        pairs = zip(short_keys(varied), varied, strict=True)
        name = ",".join(f"{k}={job.overrides[key]}" for k, key in pairs if key in job.overrides)
        # TensorBoard takes a slash for a group of runs; file systems allow 255 bytes.
        name = re.sub(r"[^ -.0-~]|\\", "_", name).strip(".")[:150] or f"job {job.number}"
        links[name if name not in links else f"{name},job={job.number}"] = os.path.relpath(
            own, board
        )
    board.mkdir(exist_ok=True)
    there = {path.name: os.readlink(path) for path in board.iterdir() if path.is_symlink()}
    for name, _ in there.items() - links.items():
        (board / name).unlink()
    for name, target in links.items() - there.items():
        (board / name).symlink_to(target)
