"""Move the checkpoints after a step to another folder, for a run that goes back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.checkpoints.index import Entry, Index
from trainer.files.atomic import link_or_copy, sync_folder

_OWN = ("last", "best")


def rewind(
    folder: Path,
    step_files: Sequence[tuple[int, Path]],
    step: int,
    best: Iterable[int],
    into: Path,
) -> None:
    """Move checkpoints after `step`, and names that refer to them, to the folder `into`.

    `last` becomes the checkpoint of `step`, `best` the first of the steps `best` that exists.
    Can be interrupted anywhere and called again. Raises OSError and StorageError.
    """
    index = Index.read(folder)
    names = {*_OWN, *index.names}
    far = {name for name in names if (_led_to(index, folder, name, step_files) or 0) > step}
    had_last = "last" in index.names
    into.mkdir(parents=True, exist_ok=True)
    _keep_record(index, step, into)
    if "best" in far:  # best.safetensors goes with the checkpoint
        _move(folder / "best.safetensors", into)
    for name in far:
        _move(folder / f"{name}.pt", into)
    for path in (path for at, path in step_files if at > step):
        entry = index.files.get(path.name)
        if entry is not None and "shards" in entry.facts:
            _move(folder / str(entry.facts["shards"]), into)
        _move(path, into)
    for entries in (index.files, index.names):
        for name in [name for name, entry in entries.items() if entry.step > step]:
            del entries[name]
    if had_last:
        _name(index, folder, "last", [step])
    if "best" not in index.names:
        _name(index, folder, "best", best)
    index.write(folder)
    sync_folder(into)


def beyond(folder: Path, step_files: Iterable[tuple[int, Path]], step: int) -> bool:
    """Return whether a checkpoint, or a name for one, is of a later step than `step`."""
    named = Index.read(folder).names
    led = [e.step for name, e in named.items() if os.path.lexists(folder / f"{name}.pt")]
    return any(at > step for at in (*led, *(at for at, _ in step_files)))


def _led_to(
    index: Index, folder: Path, name: str, step_files: Iterable[tuple[int, Path]]
) -> int | None:
    """Return the step that a name refers to: by its file, or else by the index."""
    path = folder / f"{name}.pt"
    for step, file in step_files:
        if path.exists() and path.samefile(file):
            return step
    entry = index.names.get(name)
    return None if entry is None else entry.step


def _keep_record(index: Index, step: int, into: Path) -> None:
    """Record the moved checkpoints in the index of `into`, so that they stay verified."""

    def leaving(entries: dict[str, Entry]) -> dict[str, Entry]:
        return {name: entry for name, entry in entries.items() if entry.step > step}

    record = Index.read(into)
    record.files |= leaving(index.files)
    record.names |= leaving(index.names)
    record.layouts |= index.layouts
    record.write(into)


def _name(index: Index, folder: Path, name: str, steps: Iterable[int]) -> None:
    """Let a name refer to the first of the checkpoints that exists."""
    known = {entry.step: entry for entry in index.existing(folder)}
    entry = next((known[step] for step in steps if step in known), None)
    if entry is not None:
        link_or_copy(folder / entry.file, folder / f"{name}.pt")
        index.names[name] = entry


def _move(path: Path, into: Path) -> None:
    if os.path.lexists(path):
        os.replace(path, into / path.name)
