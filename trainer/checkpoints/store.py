"""Checkpoints on disk: how they are written, named, verified and removed."""

import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.checkpoints.index import Entry, Index, finite, layout_of
from trainer.checkpoints.journal import mark
from trainer.checkpoints.reader import (
    FORMAT_VERSION,
    compare_names,
    model_only,
    read_checkpoint,
)
from trainer.checkpoints.repair import repair
from trainer.checkpoints.rewind import beyond, rewind
from trainer.checkpoints.shards import remove_unused, shard_facts
from trainer.checkpoints.writer import check_room, verify_written, write_checkpoint
from trainer.errors import CheckpointError
from trainer.files.atomic import link_or_copy, remove_orphans
from trainer.files.storage import storage_error
from trainer.runs import manifest
from trainer.runs.lock import refuse_taken

__all__ = ["FORMAT_VERSION", "CheckpointStore", "compare_names", "model_only", "read_checkpoint"]

_STEP_FILE = re.compile(r"step-(\d{8,})\.pt")
_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run: `step-00000120.pt`..., and the names `last.pt`, `best.pt`.

    `facts` are recorded in the index, together with torch version, threads, device, world size.
    """

    def __init__(self, folder: Path, *, facts: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.resumed_from: int | None = None  # step; set by newest() and load(); never pruned
        self._facts = dict(facts or {})
        self._cleaned = False
        self._kept: tuple[Index, Any] | None = None  # and the mark of its files on disk

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
        with self._changing() as index:
            check_room(path, index, payload)
            if index.files.pop(path.name, None) is not None:
                index.write(self.folder)  # or the old digest would be compared with the new file
            content = {**payload, "format_version": FORMAT_VERSION}
            size, sha256 = write_checkpoint(path, content)
            verify_written(path, size)
            facts = {**_circumstances(content), **shard_facts(content), **self._facts}
            entry = Entry(path.name, step, size, sha256, finite(metrics or {}), facts, "")
            entry = index.add(entry, layout_of(content.get("model", {})))
            self._point(index, names, entry)
        return path

    def name(self, name: str, step: int) -> Path:
        """Let `name`.pt refer to the checkpoint of `step`."""
        with self._changing() as index:
            entry = index.files.get(self.path_of(step).name)
            if entry is None:
                raise CheckpointError(
                    f"{self.path_of(step)}: there is no such checkpoint to name {name}"
                )
            self._point(index, [name], entry)
        return self.folder / f"{name}.pt"

    def complete(self, step: int, names: Sequence[str]) -> None:
        """Give the newest checkpoint its names, if a kill came between it and them.

        Raises StorageError.
        """
        self.prepare()
        with self._changing() as index:
            entry = index.files.get(self.path_of(step).name)  # None: damaged, resumed from a copy
            lacking = [name for name in names if index.names.get(name) != entry]
            if entry is not None and lacking:
                self._point(index, lacking, entry)

    def load(self, path: Path) -> dict[str, Any]:
        """Read and verify one checkpoint. Raises CheckpointError."""
        payload = read_checkpoint(path)
        match = _STEP_FILE.fullmatch(path.name)
        if match and path.parent.resolve() == self.folder.resolve():
            self.resumed_from = int(match[1])
        return payload

    def newest(self, up_to: int | None = None) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Return path and content of the newest undamaged checkpoint, and why others were skipped.

        None if there is no checkpoint. Raises CheckpointError if all are damaged, or one contains
        code or has a newer format. Steps after `up_to` are ignored.
        """
        passed: list[str] = []
        for path in self._candidates(up_to):
            try:
                payload = self.load(path)
            except DamagedCheckpointError as error:
                passed.append(str(error))
                continue
            return path, payload, passed
        lost = passed or [f"{name} is missing" for name in Index.read(self.folder).files]
        if lost:
            raise CheckpointError(f"{self.folder}: no checkpoint is whole: {'; '.join(lost)}")
        return None

    def entries(self) -> list[Entry]:
        """Return the recorded checkpoints that exist, sorted by step."""
        return Index.read(self.folder).existing(self.folder)

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint of `step` exists, under any name."""
        names = Index.read(self.folder).names
        led = (self.folder / f"{name}.pt" for name, entry in names.items() if entry.step == step)
        return any(path.exists() for path in (self.path_of(step), *led))

    def beyond(self, step: int) -> bool:
        """Return whether a checkpoint of a later step exists."""
        return beyond(self.folder, self._step_files(), step)

    def rewind(self, step: int, best: Iterable[int], into: Path) -> None:
        """Move checkpoints after `step` to the folder `into`; `best` ranks the rest."""
        if self.folder.is_dir():
            rewind(self.folder, self._step_files(), step, best, into)

    def prune(self, keep: Collection[int]) -> list[Path]:
        """Remove checkpoints whose step is not in `keep`; return their paths.

        The newest two, those that have a name, and the one resumed from are always kept. A file
        that cannot be removed is a warning.
        """
        with self._changing() as index:
            whole = [entry.step for entry in index.existing(self.folder)]
            if len(whole) < 2:
                return []
            named = {entry.step for entry in index.names.values()}
            kept = {*keep, *whole[-2:], *named, self.resumed_from}
            files = self._step_files()
            removed = [path for step, path in files if step not in kept and _remove(path)]
            if removed:
                for path in removed:
                    index.files.pop(path.name, None)
                index.write(self.folder)
            remove_unused(self.folder, index)
        return removed

    def clean(self) -> list[Path]:
        """Remove and repair what a killed writer left; return the removed files.

        Only for the process that holds the lock of the run.
        """
        removed = remove_orphans(self.folder)
        repair(self.folder, self._step_files())
        remove_unused(self.folder, Index.read(self.folder))
        self._cleaned = True
        return removed

    def prepare(self) -> None:
        """Make the folder; clean it at the first call, when this process holds the lock of the run.

        Raises StorageError.
        """
        refuse_taken(self.folder.parent)
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        if not self._cleaned:
            self.clean()

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, whether it exists or not."""
        return self.folder / f"step-{step:08d}.pt"

    @contextmanager
    def _changing(self) -> Iterator[Index]:
        """Give the index to be changed: that of the last change, or read anew.

        It is read where another process has written it, and after a change that failed half-way.
        """
        kept, self._kept = self._kept, None
        known = kept is not None and kept[1] == mark(self.folder)
        index = kept[0] if kept is not None and known else Index.read(self.folder)
        yield index
        self._kept = index, mark(self.folder)

    def _point(self, index: Index, names: Sequence[str], entry: Entry) -> None:
        for name in names:
            link_or_copy(self.folder / entry.file, self.folder / f"{name}.pt")
            index.names[name] = entry
        index.write(self.folder)

    def _step_files(self) -> list[tuple[int, Path]]:
        """Return step and path of the files named like checkpoints, newest first."""
        found = [(_STEP_FILE.fullmatch(path.name), path) for path in _listed(self.folder)]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def _candidates(self, up_to: int | None) -> list[Path]:
        """Return step files, newest first, then names that are copies instead of links."""
        files = self._step_files()
        known = Index.read(self.folder).names
        by_step = sorted(known, key=lambda name: known[name].step, reverse=True)
        names = dict.fromkeys([*by_step, "last", "best"])
        copies = [self.folder / f"{name}.pt" for name in names]
        own = [copy for copy in copies if not any(_same(copy, path) for _, path in files)]
        bound = math.inf if up_to is None else up_to
        far = {self.folder / f"{name}.pt" for name in known if known[name].step > bound}
        steps = [path for step, path in files if step <= bound]
        return steps + [copy for copy in own if copy not in far and os.path.lexists(copy)]


def _circumstances(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that an exact resume depends on."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    tensors = (t for t in payload.get("model", {}).values() if isinstance(t, torch.Tensor))
    devices = (t.device for t in tensors)
    device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))
    return {
        "saved": manifest.now(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "world_size": torch.distributed.get_world_size() if distributed else 1,
    }


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _remove(path: Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror)
        return False
    return True
