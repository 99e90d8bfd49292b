"""`tensorboard/` of a sweep: a link to each job's folder, named after its varied values."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.sweeps.leaderboard import short_keys
from scripts.sweeps.process import Outcome
from trainer.files.atomic import write_json
from trainer.runs.dashboard import FOLDER, SWEEP

_LONGEST = 150  # characters of a name, as file systems allow 255 bytes
_OWN = "events.out.tfevents.*"


def begin(sweep: Path, varied: Sequence[str]) -> None:
    """Write down what varies, for the jobs' columns of the HParams tab."""
    write_json(sweep / SWEEP, {"swept": list(varied)})


def arrange(sweep: Path, jobs: Sequence[Outcome], varied: Sequence[str]) -> None:
    """Link the jobs that have been started, and give a row to those that could not write one.

    What has no job any more, since the grid has changed, is removed. What cannot be written is
    left out: a dashboard must not end a sweep.
    """
    board = sweep / FOLDER
    names = job_names(jobs, varied)
    try:
        board.mkdir(exist_ok=True)
        for path in board.iterdir():
            if path.name not in names.values():
                _remove(path)
        for job in jobs:
            _show(board / names[job.number], job, {key: job.overrides.get(key) for key in varied})
    except OSError:
        return


def job_names(jobs: Iterable[Outcome], varied: Sequence[str]) -> dict[int, str]:
    """Return a name for each job by its number: `lr=0.1,seed=2`."""
    short = dict(zip(varied, short_keys(varied), strict=True))
    names = {
        job.number: ",".join(
            f"{short[key]}={job.overrides[key]}" for key in varied if key in job.overrides
        )
        for job in jobs
    }
    # The name is one of a folder; TensorBoard takes a slash for a group of runs.
    plain = {number: _plain(name) or f"job {number}" for number, name in names.items()}
    count = Counter(plain.values())
    return {n: name if count[name] == 1 else f"{name},job={n}" for n, name in plain.items()}


def _plain(name: str) -> str:
    name = "".join("_" if sign in "/\\\0" or not sign.isprintable() else sign for sign in name)
    return name.strip(".")[:_LONGEST]


def _show(place: Path, job: Outcome, values: Mapping[str, str | None]) -> None:
    own = job.run_dir / FOLDER
    if own.is_dir():
        _link(place, own)
        if job.state == "killed":  # by what left it no time to say so
            _add_row(own, {}, failed=True)
    elif job.failed and not place.exists():
        _remove(place)
        _add_row(place, {k: yaml.safe_load(v) for k, v in values.items() if v}, failed=True)


def link_started(sweep: Path, jobs: Sequence[Outcome], job: Outcome, varied: Sequence[str]) -> None:
    """Link a job that starts now: a TensorBoard that is open finds its folder once it is there."""
    try:
        (sweep / FOLDER).mkdir(exist_ok=True)
        _link(sweep / FOLDER / job_names(jobs, varied)[job.number], job.run_dir / FOLDER)
    except OSError:
        return


def _link(place: Path, own: Path) -> None:
    target = os.path.relpath(own, place.parent)
    if place.is_symlink() and os.readlink(place) == target:
        return
    _remove(place)
    place.symlink_to(target)


def _remove(place: Path) -> None:
    """Remove what is ours: a link, or a folder with a row alone."""
    if place.is_symlink():
        place.unlink()
    elif place.is_dir() and all(path.match(_OWN) for path in place.iterdir()):
        shutil.rmtree(place)


def _add_row(folder: Path, values: Mapping[str, Any], failed: bool) -> None:
    # Imported for a job that failed only: TensorBoard's files need its protocol buffers.
    from callbacks.support.event_file import EventFile
    from callbacks.support.hparams import session_end, session_start

    known = sorted(path.name for path in folder.glob(_OWN))
    if known and known[-1].endswith(".row.regimen"):
        return
    file = EventFile(folder, len(known), kind="row")
    if values:
        file.summary(0, session_start(values))
    file.summary(0, session_end(failed=failed))
