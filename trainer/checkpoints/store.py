"""The checkpoints of a run: how they are written, named, found again and removed."""

import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from regimen.trainer.checkpoints.archive import DamagedCheckpointError, digest, write_archive
from regimen.trainer.checkpoints.reader import FORMAT_VERSION, Entry, Index, form, read_checkpoint
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
        self._in_order = False  # whether files, names and index are known to agree

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
        self._in_order = False  # what fails from here on is put right as after a kill
        index = Index.read(self.folder)
        if index.files.pop(path.name, None) is not None:
            index.write(self.folder)  # or the old digest would be compared with the new file
        write_archive(path, {**payload, "format_version": FORMAT_VERSION})
        finite = {k: float(v) if math.isfinite(v) else None for k, v in (metrics or {}).items()}
        with storing(path):  # the folder may vanish while the file is hashed
            entry = _enter(index, path, payload, finite)
        self._point(index, dict.fromkeys(names, entry))
        return path

    def name(self, names: Mapping[str, int]) -> None:
        """Let each name refer to the checkpoint of its step, if there is one. Raises StorageError.

        A kill or a full disk can come between a checkpoint and its names.
        """
        index = Index.read(self.folder)
        wanted = {name: index.files.get(self.path_of(step).name) for name, step in names.items()}
        lacking = {n: entry for n, entry in wanted.items() if entry and index.names.get(n) != entry}
        if lacking:
            self._in_order = False
            self._point(index, lacking)

    def newest(self, up_to: int | None = None) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Return path and content of the newest undamaged checkpoint, and why others were skipped.

        None if there is no checkpoint. Raises CheckpointError if all are damaged, or one contains
        code or has another format. Steps after `up_to` are ignored.
        """
        passed = dict[Path, str]()
        for path, step in self._steps().items():
            if (up_to is None or step <= up_to) and not any(_same(path, p) for p in passed):
                try:
                    return path, read_checkpoint(path), list(passed.values())
                except DamagedCheckpointError as error:
                    passed[path] = str(error)
        missing = [f"{name} is missing" for name in Index.read(self.folder).files]
        if lost := [*passed.values()] or missing:
            raise CheckpointError(f"{self.folder}: no checkpoint is whole: {'; '.join(lost)}")
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
        left_over = [path for path, step in self._step_files().items() if step not in kept]
        for path in left_over:
            try:
                os.unlink(path)
                index.files.pop(path.name, None)
            except OSError as error:
                _log.warning("cannot remove %s: %s", path, error.strerror)
        if left_over:
            index.write(self.folder)
            self._remove_unused_shards(index)

    def prepare(self) -> None:
        """Make the folder; clean it at the first call, and after a failure. Raises StorageError."""
        refuse_taken(self.folder.parent)
        with storing(self.folder):
            self.folder.mkdir(exist_ok=True)
        if not self._in_order:
            self.clean()
            self._in_order = True

    def clean(self) -> None:
        """Remove temporary files, enter whole checkpoints, and correct what each name refers to.

        Only the process that holds the lock of the run may call this. Damaged files are left alone:
        `newest` reports them.
        """
        remove_orphans(self.folder)
        index = Index.read(self.folder)
        before = dict(index.files), dict(index.names)
        for path in self._step_files():
            if path.name not in index.files:
                try:
                    _enter(index, path, read_checkpoint(path), {})
                except CheckpointError as error:
                    _log.warning("left out of the index: %s", error)
        for name in {"last": None, **index.names}:
            path, recorded = self.folder / f"{name}.pt", index.names.get(name)
            entries = index.files.values()
            linked = next((e for e in entries if _same(path, self.folder / e.file)), None)
            if linked is not None and not path.is_symlink():
                index.names[name] = linked
            elif recorded and not (path.is_file() and digest(path) == recorded.sha256):
                source = self.folder / recorded.file
                if recorded in entries and source.is_file():
                    _log.warning("%s was another checkpoint and is %s again", path, recorded.file)
                    link_or_copy(source, path)
        if before != (index.files, index.names):
            index.write(self.folder)
        self._remove_unused_shards(index)

    def rewind(self, step: int, best: Iterable[int], into: Path) -> None:
        """Move checkpoints after `step`, and names that refer to them, to the folder `into`.

        `last` becomes the checkpoint of `step`, `best` the first of the steps `best` that exists.
        Can be interrupted anywhere and called again. Raises OSError and StorageError.
        """
        if not self.folder.is_dir():
            return
        into.mkdir(parents=True, exist_ok=True)
        index, left = Index.read(self.folder), Index.read(into)
        far = [path.name for path, at in self._steps().items() if at > step]
        had_last = "last" in index.names
        left.layout = index.layout
        for here, there in ((index.files, left.files), (index.names, left.names)):
            there |= {name: here.pop(name) for name in list(here) if here[name].step > step}
        left.write(into)  # first, so that they stay verified
        far[:0] = ["best.safetensors"] if "best.pt" in far else []  # first: a kill may follow
        far += [str(e.facts["shards"]) for e in left.files.values() if "shards" in e.facts]
        for name in far:
            if os.path.lexists(self.folder / name):
                os.replace(self.folder / name, into / name)
        known = self._whole(index)
        names = {"last": known.get(step)} if had_last else {}
        if "best" not in index.names:
            names["best"] = next((known[at] for at in best if at in known), None)
        self._point(index, {name: entry for name, entry in names.items() if entry})
        sync_folder(into)

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, whether it exists or not."""
        return self.folder / f"step-{step:08d}.pt"

    def _point(self, index: Index, names: Mapping[str, Entry]) -> None:
        for name, entry in names.items():
            link_or_copy(self.folder / entry.file, self.folder / f"{name}.pt")
            index.names[name] = entry
        index.write(self.folder)
        self._in_order = True

    def _whole(self, index: Index) -> dict[int, Entry]:
        """Return by step the entries whose files have the size that was recorded."""
        sizes = {path.name: path.stat().st_size for path in self._step_files()}
        return {e.step: e for e in index.files.values() if sizes.get(e.file) == e.size}

    def _step_files(self) -> dict[Path, int]:
        """Return the files named like checkpoints and their steps, newest first."""
        found = [(_STEP_FILE.fullmatch(path.name), path) for path in self.folder.glob("step-*.pt")]
        steps = sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
        return {path: step for step, path in steps}

    def _steps(self) -> dict[Path, int]:
        """Return the step of each step file, newest first, and of each name (-1: unknown)."""
        files, names = self._step_files(), {}
        known = {name: entry.step for name, entry in Index.read(self.folder).names.items()}
        for name, step in {"last": -1, "best": -1, **known}.items():
            path = self.folder / f"{name}.pt"
            if os.path.lexists(path):
                names[path] = next((at for file, at in files.items() if _same(path, file)), step)
        return files | dict(sorted(names.items(), key=lambda pair: -pair[1]))

    def _remove_unused_shards(self, index: Index) -> None:
        """Remove the shards that no checkpoint refers to, as far as possible."""
        used = {e.facts.get("shards") for e in (*index.files.values(), *index.names.values())}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


def _enter(
    index: Index, path: Path, payload: Mapping[str, Any], metrics: dict[str, float | None]
) -> Entry:
    state = payload.get("state", {})
    facts = {"saved": now(), "world_size": state.get("world_size"), **state.get("made_with", {})}
    if shards := payload.get("shards"):
        facts["shards"] = Path(shards["folder"]).name
    step = int(path.stem.removeprefix("step-"))
    entry = Entry(path.name, step, path.stat().st_size, digest(path), metrics, facts)
    index.files[path.name] = entry
    weights = payload.get("model", {}).items()
    index.layout = {name: form(v) for name, v in weights if isinstance(v, Tensor)}
    return entry


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
