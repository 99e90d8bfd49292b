"""Rewind a run: whatever is beyond the step that it continues from is moved to `abandoned/`.

A run has one history. A note is written before the rewind and removed after it. If the run is
killed in between, the next process that continues the run completes the rewind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoints.store import CheckpointStore
from trainer.errors import CheckpointError
from trainer.files.atomic import remove_orphans, replacing, sync_folder, write_json
from trainer.files.storage import storage_error
from trainer.runs.directory import reserve, timestamp
from trainer.runs.status import METRICS, RunDirectoryError, read_json
from trainer.snapshot import name_of

FOLDER = "abandoned"
_NOTE = "unfinished.json"
_EVENTS = Path("tensorboard"), "events.out.tfevents.*.regimen"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the history of a run, with the sizes of its logs, from a checkpoint."""

    step: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of the logs, by file name
    best: tuple[int, ...] = ()  # steps of checkpoints, the best first

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Moment:
        """Return the point at which the checkpoint `payload` was saved."""
        callbacks = payload["callbacks"]
        saver = callbacks.get(name_of("saver", payload) or "", {})
        known = [state.get("sizes") for state in callbacks.values()]
        sizes = {
            name: int(n) for part in known if isinstance(part, dict) for name, n in part.items()
        }
        before = callbacks.get("metrics_log", {}).get("offset")  # of older checkpoints
        sizes |= {} if before is None else {METRICS: int(before)}
        return cls(
            step=int(payload["state"]["counters"]["global_step"]),
            sizes=sizes,
            best=tuple(int(step) for step, _ in saver.get("ranking", ())),
        )


def going_back_to(run: Path) -> int | None:
    """Return the step of a rewind that was interrupted; None if there is none."""
    try:
        note = read_json(run / FOLDER / _NOTE)
    except RunDirectoryError as error:
        raise CheckpointError(f"{error}: it holds the step that the run continues from") from error
    return int(note["step"]) if note else None


def go_back(run: Path, moment: Moment) -> Path | None:
    """Move whatever is beyond `moment` out of `run`; return its new folder, or None.

    Only the process that has locked the run may call this. Raises StorageError.
    """
    store = CheckpointStore(run / "checkpoints")
    longer = _longer(run, moment)
    before = going_back_to(run)
    if before is None and not longer and not store.beyond(moment.step):
        return None
    folder = _noted(run, moment.step)
    places = (run / FOLDER, folder, folder / "checkpoints", folder / _EVENTS[0], store.folder)
    for place in places:
        remove_orphans(place)
    try:
        store.rewind(moment.step, moment.best, folder / "checkpoints")
        for path, size in longer.items():
            _cut(path, size, folder / path.relative_to(run))
        (run / FOLDER / _NOTE).unlink()
        sync_folder(run / FOLDER)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def _noted(run: Path, step: int) -> Path:
    """Write the note of a rewind to `step`; return the folder for what is moved."""
    note = read_json(run / FOLDER / _NOTE)
    if note.get("step") == step:  # an interrupted rewind
        return run / FOLDER / Path(str(note["folder"])).name
    folder = reserve(run / FOLDER, timestamp())
    write_json(run / FOLDER / _NOTE, {"step": step, "folder": folder.name})
    return folder


def _longer(run: Path, moment: Moment) -> dict[Path, int]:
    """Return the logs that are longer than at `moment`, with their sizes at that point."""
    logs = [run / METRICS, *(run / _EVENTS[0]).glob(_EVENTS[1])]
    sizes = {path: moment.sizes.get(path.name, 0) for path in logs}
    return {path: size for path, size in sizes.items() if path.is_file() and _size(path) > size}


def _cut(path: Path, size: int, into: Path) -> None:
    """Move what follows `size` bytes; the copy is durable before the file is truncated."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") as source, replacing(into) as copy:
        source.seek(size)
        shutil.copyfileobj(source, copy, 1 << 20)
    if size or path.parent.name != _EVENTS[0].name:
        os.truncate(path, size)
    else:  # nothing of it is left
        path.unlink()


def _size(path: Path) -> int:
    return path.stat().st_size
