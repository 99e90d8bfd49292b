"""Rewind the files of a run to one of its checkpoints.

A run has one history: what it did beyond the step that it continues from moves to `abandoned/`.
A note is written there before that and removed after it. If the process is killed in between, the
next process that continues the run completes the rewind.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from regimen.conf.json_text import form_fault
from regimen.trainer import snapshot
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
from regimen.trainer.files.atomic import remove_orphans, replacing, storing, sync_folder, write_json
from regimen.trainer.files.names import path_below
from regimen.trainer.runs.directory import reserve, timestamp
from regimen.trainer.runs.status import (
    CHECKPOINTS,
    METRICS,
    TENSORBOARD,
    RunDirectoryError,
    read_json,
)

_ARCHIVE = "abandoned"
_NOTE = "unfinished.json"
_EVENTS = "events.out.tfevents.*.regimen"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """A checkpoint in the history of a run, and the sizes that its logs had then."""

    step: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of the logs, by file name
    best: tuple[int, ...] = ()  # steps of checkpoints, the best first

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """Return the point at which the checkpoint `payload` was saved."""
        callbacks: Mapping[str, Any] = payload["callbacks"]
        sizes = dict[str, int]()
        for state in callbacks.values():
            if isinstance(state, dict):
                sizes |= state.get("sizes", {})
        saver_name = snapshot.name_of("saver", payload) or ""
        ranking = callbacks.get(saver_name, {}).get("ranking", ())
        best = tuple(int(step) for step, _ in ranking)
        return cls(snapshot.log_point_of(payload).step, sizes, best)


def interrupted_rewind(run: Path) -> int | None:
    """Return the step of a rewind that was interrupted; None if there is none.

    Raises CheckpointError if the note of it is damaged.
    """
    path = run / _ARCHIVE / _NOTE
    try:
        note = read_json(path)
    except RunDirectoryError as error:
        raise CheckpointError(f"{error}: it holds the step that the run continues from") from error
    if not note:
        return None
    fault = form_fault(note, {"step": int, "folder": str})
    if fault is not None:
        raise CheckpointError(f"{path}: {fault}: it says where the run goes on")
    return int(note["step"])


def rewind(run: Path, point: RewindPoint) -> Path | None:
    """Move what lies beyond `point` to a new folder in `run/abandoned`.

    Returns the folder, or None if nothing lies beyond. Only the process that has locked the run may
    call this. Raises StorageError, and CheckpointError for a damaged note.
    """
    store = CheckpointStore(run / CHECKPOINTS)
    tails = _tails(run, point)
    interrupted = interrupted_rewind(run)
    if interrupted is None and not tails and max(store.steps(), default=0) <= point.step:
        return None

    archive = run / _ARCHIVE
    note = archive / _NOTE
    if interrupted == point.step:
        try:
            folder = path_below(archive, read_json(note)["folder"])
        except (LookupError, ValueError) as error:
            raise CheckpointError(f"{note}: {error!r}") from error
    else:
        folder = reserve(archive, timestamp())
        # Before anything moves: from here on a killed rewind is completed by the next start.
        write_json(note, {"step": point.step, "folder": folder.name})

    moved_checkpoints = folder / CHECKPOINTS
    for place in (archive, folder, moved_checkpoints, folder / TENSORBOARD, store.folder):
        remove_orphans(place)
    with storing(folder):
        store.rewind(point.step, point.best, moved_checkpoints)
        for path, size in tails.items():
            _archive_tail(path, size, folder / path.relative_to(run))
        note.unlink()
        sync_folder(archive)
    return folder


def _tails(run: Path, point: RewindPoint) -> dict[Path, int]:
    """Return the logs that are longer than they were at `point`, with their sizes then."""
    tails = {}
    for path in (run / METRICS, *(run / TENSORBOARD).glob(_EVENTS)):
        size = point.sizes.get(path.name, 0)
        if path.is_file() and path.stat().st_size > size:
            tails[path] = size
    return tails


def _archive_tail(path: Path, size: int, target: Path) -> None:
    """Move what a log holds beyond `size` bytes to the file `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") as source, replacing(target) as copy:
        source.seek(size)
        shutil.copyfileobj(source, copy, _COPY_BYTES)
    # The copy is durable by now, so a kill loses nothing.
    if size or path.name == METRICS:
        os.truncate(path, size)
    else:
        path.unlink()  # an event file that did not exist at that step
