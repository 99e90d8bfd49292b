"""The checkpoints of a run: how they are written, named, read again and removed."""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from regimen.trainer.checkpoints.archive import DamagedCheckpointError, digest, write_archive
from regimen.trainer.checkpoints.reader import (
    FORMAT_VERSION,
    Entry,
    Index,
    describe_weight,
    read_checkpoint,
)
from regimen.trainer.checkpoints.shards import SUFFIX
from regimen.trainer.errors import CheckpointError
from regimen.trainer.files.atomic import link_or_copy, remove_orphans, storing, sync_folder
from regimen.trainer.runs.directory import now
from regimen.trainer.runs.lock import refuse_taken

_STEP_FILE = re.compile(r"step-(\d{8,})\.pt")
_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run: `step-00000120.pt`..., and the names `last.pt`, `best.pt`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_consistent = False  # files, names and index are known to agree

    def save(
        self,
        payload: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        names: Sequence[str] = ("last",),
    ) -> Path:
        """Write one checkpoint; it is durable before any name refers to it. Raises StorageError.

        If it fails, the earlier checkpoints and names are unchanged.
        """
        path = self.path_of(step)
        self.prepare()
        self._is_consistent = False  # a failure from here on is repaired like a kill
        index = Index.read(self.folder)
        if index.files.pop(path.name, None) is not None:
            index.write(self.folder)  # or the old digest would be compared with the new file
        write_archive(path, {**payload, "format_version": FORMAT_VERSION})
        values = {name: float(value) for name, value in (metrics or {}).items()}
        with storing(path):  # the folder may vanish while the file is hashed
            entry = _add_entry(index, path, payload, values)
        self._point(index, dict.fromkeys(names, entry))
        return path

    def name(self, names: Mapping[str, int]) -> None:
        """Let each name refer to the checkpoint of its step, if there is one. Raises StorageError.

        Repairs what a kill or a full disk between a checkpoint and its names has left.
        """
        index = Index.read(self.folder)
        changed = {}
        for name, step in names.items():
            entry = index.files.get(self.path_of(step).name)
            if entry and index.names.get(name) != entry:
                changed[name] = entry
        if changed:
            self._is_consistent = False
            self._point(index, changed)

    def newest(self, up_to: int | None = None) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Return path and content of the newest undamaged checkpoint, and why others were skipped.

        None if there is no checkpoint. Raises CheckpointError if all are damaged, or one contains
        code or has another format. Steps after `up_to` are ignored.
        """
        damaged = dict[Path, str]()
        for path, step in self._steps().items():
            if up_to is not None and step > up_to:
                continue
            if any(_same(path, other) for other in damaged):
                continue
            try:
                return path, read_checkpoint(path), list(damaged.values())
            except DamagedCheckpointError as error:
                damaged[path] = str(error)
        reasons = list(damaged.values())
        if not reasons:
            reasons = [f"{name} is missing" for name in Index.read(self.folder).files]
        if reasons:
            raise CheckpointError(f"{self.folder}: no checkpoint is whole: {'; '.join(reasons)}")
        return None

    def steps(self) -> set[int]:
        """Return the steps of the checkpoints that exist, under any name."""
        return {step for path, step in self._steps().items() if path.exists()}

    def prune(self, keep: Collection[int]) -> None:
        """Remove checkpoints whose step is not in `keep`.

        The newest two whole ones, and those that have a name, are always kept. A file that cannot
        be removed is a warning.
        """
        index = Index.read(self.folder)
        whole = sorted(self._whole(index))
        if len(whole) < 2:
            return
        kept = {*keep, *whole[-2:], *(entry.step for entry in index.names.values())}
        surplus = [path for path, step in self._step_files().items() if step not in kept]
        for path in surplus:
            try:
                os.unlink(path)
                index.files.pop(path.name, None)
            except OSError as error:
                _log.warning("cannot remove %s: %s", path, error.strerror)
        if surplus:
            index.write(self.folder)
            self._remove_unused_shards(index)

    def prepare(self) -> None:
        """Make the folder; clean it at the first call, and after a failure. Raises StorageError."""
        refuse_taken(self.folder.parent)
        with storing(self.folder):
            self.folder.mkdir(exist_ok=True)
        if not self._is_consistent:
            self.clean()
            self._is_consistent = True

    def clean(self) -> None:
        """Remove temporary files, enter whole checkpoints, and correct what each name refers to.

        Only the process that holds the lock of the run may call this. Damaged files are left alone:
        `newest` reports them.
        """
        remove_orphans(self.folder)
        index = Index.read(self.folder)
        files_before = dict(index.files)
        names_before = dict(index.names)
        for path in self._step_files():
            if path.name not in index.files:
                try:
                    _add_entry(index, path, read_checkpoint(path), {})
                except CheckpointError as error:
                    _log.warning("left out of the index: %s", error)
        for name in {"last": None, **index.names}:
            self._repair_name(index, name)
        if (files_before, names_before) != (index.files, index.names):
            index.write(self.folder)
        self._remove_unused_shards(index)

    def _repair_name(self, index: Index, name: str) -> None:
        """Make the index follow the file of a name; restore the file if it is no checkpoint."""
        path = self._path_of_name(name)
        entries = index.files.values()
        linked = next((e for e in entries if _same(path, self.folder / e.file)), None)
        if linked is not None and not path.is_symlink():
            index.names[name] = linked
            return
        recorded = index.names.get(name)
        if recorded is None or (path.is_file() and digest(path) == recorded.sha256):
            return
        source = self.folder / recorded.file
        if recorded in entries and source.is_file():
            _log.warning("%s was another checkpoint and is %s again", path, recorded.file)
            link_or_copy(source, path)

    def rewind(self, step: int, best: Iterable[int], into: Path) -> None:
        """Move checkpoints after `step`, and names that refer to them, to the folder `into`.

        `last` becomes the checkpoint of `step`, `best` the first of the steps `best` that exists.
        Can be interrupted anywhere and called again. Raises OSError and StorageError.
        """
        if not self.folder.is_dir():
            return
        into.mkdir(parents=True, exist_ok=True)
        index = Index.read(self.folder)
        moved = Index.read(into)
        had_last = "last" in index.names
        files = [path.name for path, at in self._steps().items() if at > step]
        if "best.pt" in files:
            # Before best.pt: after a kill between the two, only best.pt leads here again.
            files.insert(0, "best.safetensors")

        moved.layout = index.layout
        _move_entries(index.files, moved.files, step)
        _move_entries(index.names, moved.names, step)
        moved.write(into)  # before the files: their digests are verified there too
        files += [str(e.facts["shards"]) for e in moved.files.values() if "shards" in e.facts]
        for name in files:
            if os.path.lexists(self.folder / name):
                os.replace(self.folder / name, into / name)

        whole = self._whole(index)
        names = {}
        if had_last and step in whole:
            names["last"] = whole[step]
        best_step = next((at for at in best if at in whole), None)
        if best_step is not None and "best" not in index.names:
            names["best"] = whole[best_step]
        self._point(index, names)
        sync_folder(into)

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, whether it exists or not."""
        return self.folder / f"step-{step:08d}.pt"

    def _path_of_name(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def _point(self, index: Index, names: Mapping[str, Entry]) -> None:
        """Let names refer to entries; the index, written last, makes it durable."""
        for name, entry in names.items():
            link_or_copy(self.folder / entry.file, self._path_of_name(name))
            index.names[name] = entry
        index.write(self.folder)
        self._is_consistent = True

    def _whole(self, index: Index) -> dict[int, Entry]:
        """Return by step the entries whose files have the size that was recorded."""
        sizes = {path.name: path.stat().st_size for path in self._step_files()}
        return {e.step: e for e in index.files.values() if sizes.get(e.file) == e.size}

    def _step_files(self) -> dict[Path, int]:
        """Return the files named like checkpoints and their steps, newest first."""
        steps = {}
        for path in self.folder.glob("step-*.pt"):
            match = _STEP_FILE.fullmatch(path.name)
            if match is not None:
                steps[path] = int(match[1])
        return dict(sorted(steps.items(), key=lambda item: (item[1], item[0]), reverse=True))

    def _steps(self) -> dict[Path, int]:
        """Return the step of each step file, newest first, and of each name (-1: unknown)."""
        files = self._step_files()
        recorded = {name: entry.step for name, entry in Index.read(self.folder).names.items()}
        names = {}
        for name, step in {"last": -1, "best": -1, **recorded}.items():
            path = self._path_of_name(name)
            if os.path.lexists(path):
                # A link counts for more than the index, which is written after it.
                names[path] = next((at for file, at in files.items() if _same(path, file)), step)
        return files | dict(sorted(names.items(), key=lambda item: -item[1]))

    def _remove_unused_shards(self, index: Index) -> None:
        """Remove the shards that no checkpoint refers to, as far as possible."""
        used = {e.facts.get("shards") for e in (*index.files.values(), *index.names.values())}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


def _add_entry(
    index: Index, path: Path, payload: Mapping[str, Any], metrics: Mapping[str, float]
) -> Entry:
    """Add a checkpoint file to the index; waits for the disk to hash it."""
    state = payload.get("state", {})
    facts = {"saved": now(), "world_size": state.get("world_size"), **state.get("made_with", {})}
    shards = payload.get("shards")
    if shards:
        facts["shards"] = Path(shards["folder"]).name
    step = int(path.stem.removeprefix("step-"))
    entry = Entry(path.name, step, path.stat().st_size, digest(path), dict(metrics), facts)
    index.files[path.name] = entry
    weights = payload.get("model", {})
    index.layout = {n: describe_weight(v) for n, v in weights.items() if isinstance(v, Tensor)}
    return entry


def _move_entries(source: dict[str, Entry], target: dict[str, Entry], step: int) -> None:
    """Move the entries after `step`."""
    for name in list(source):
        if source[name].step > step:
            target[name] = source.pop(name)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
