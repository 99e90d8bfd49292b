"""Make the index and the names `last`, `best` agree with the files after a kill."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.checkpoints.archive import digest
from trainer.checkpoints.index import Entry, Index, layout_of
from trainer.checkpoints.reader import read_checkpoint
from trainer.checkpoints.shards import shard_facts
from trainer.errors import CheckpointError
from trainer.files.atomic import link_or_copy
from trainer.runs.metrics import read_metrics

_log = logging.getLogger(__name__)


def repair(folder: Path, step_files: Iterable[tuple[int, Path]]) -> None:
    """Add complete checkpoints that the index lacks, and correct what each name refers to.

    Their metrics are those that the run's log has of their step. Damaged files are left alone:
    `CheckpointStore.newest` reports them. Raises StorageError.
    """
    index = Index.read(folder)
    changed = [_enter(index, step, path) for step, path in step_files]
    changed += [_restore(index, folder, name) for name in ["last", *index.names]]
    if any(changed):
        index.write(folder)


def _enter(index: Index, step: int, path: Path) -> bool:
    if path.name in index.files:
        return False
    try:
        payload = read_checkpoint(path)
    except CheckpointError as error:
        _log.warning("left out of the index: %s", error)
        return False
    facts, metrics = shard_facts(payload), _logged(path.parent.parent, step)
    entry = Entry(path.name, step, path.stat().st_size, digest(path), metrics, facts, "")
    index.add(entry, layout_of(payload.get("model", {})))
    return True


def _logged(run_dir: Path, step: int) -> dict[str, float | None]:
    """Return what a run logged at a step before it saved: what a save writes into the index."""
    found: dict[str, float | None] = {}
    for line in read_metrics(run_dir):
        if line.get("step") == step:
            found |= {key: value for key, value in line.items() if _is_saved(key, value)}
    return found


def _is_saved(key: str, value: Any) -> bool:
    counter = key in ("step", "epoch") or key.startswith(("best/", "test/"))
    return not counter and isinstance(value, float | int | None)


def _restore(index: Index, folder: Path, name: str) -> bool:
    """Correct one name or its record; return whether the record changed."""
    path = folder / f"{name}.pt"
    recorded = index.names.get(name)
    led_to = [entry for entry in index.files.values() if _same(path, folder / entry.file)]
    if led_to and not path.is_symlink():
        index.names[name] = led_to[0]
        return led_to[0] != recorded
    if recorded is None or (path.is_file() and digest(path) == recorded.sha256):
        return False
    if index.files.get(recorded.file) == recorded and (folder / recorded.file).is_file():
        _log.warning("%s was another checkpoint and is %s again", path, recorded.file)
        link_or_copy(folder / recorded.file, path)
    return False


def _same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
