"""A copy of a run directory at an address that fsspec opens: s3://..., gs://..., file://..."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import fsspec

from conf.errors import ConfigError
from trainer.errors import StorageError
from trainer.files.atomic import TEMPORARY, link_or_copy
from trainer.runs.lock import LOCK_FILE
from trainer.runs.status import CHECKPOINTS

INDEX = f"{CHECKPOINTS}/index.json"
_PATIENCE = 10.0  # seconds for an address to answer


def is_remote(place: str) -> bool:
    """Return whether a place is an address, and no path of this machine."""
    return "://" in place


def check_address(address: str) -> None:
    """Raise ConfigError for an address that no file system here is for; it is not reached."""
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(address))
    except (ImportError, ValueError) as error:
        raise ConfigError("", f"{address} cannot be opened: {error}") from error


class Remote:
    """The run at an address; its `index.json` names only checkpoints that are there whole."""

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address
        self.files, self._root = fsspec.url_to_fs(address)

    def probe(self) -> None:
        """Write and remove a file. Raises StorageError, after ten seconds without an answer."""
        failures: list[Exception] = [TimeoutError(f"no answer within {_PATIENCE:g} s")]

        def ask() -> None:
            try:
                self._put(b"", f"{TEMPORARY}probe")
                self.files.rm_file(f"{self._root}/{TEMPORARY}probe")
                failures.clear()
            except Exception as error:  # each kind of storage has its own
                failures[:] = [error]

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_PATIENCE)
        for why in failures:
            raise StorageError(f"cannot write to {self.address}: {why}") from why

    def send(self, folder: Path) -> None:
        """Copy what is new of a run: logs and settings, checkpoints, then the index.

        Checkpoints that the index no longer names are removed after that. A copy may end at any
        moment: the index tells of the run as it was before.
        """
        listed = (folder / INDEX).read_bytes()
        kept = json.loads(listed)["files"].keys()
        for path in _files(folder):
            if path.relative_to(folder).parts[0] != CHECKPOINTS:
                self._put(path.read_bytes(), path.relative_to(folder).as_posix())
        there = self._checkpoints()
        for path in _files(folder / CHECKPOINTS):
            name = path.relative_to(folder).as_posix()
            if name.split("/")[1] in kept and there.get(name) != path.stat().st_size:
                self.files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(path), f"{self._root}/{name}")
        self._put(listed, INDEX)
        for name in self._checkpoints():  # what a copy left that ended, too
            if name.split("/")[1] not in (*kept, "index.json"):
                self.files.rm_file(f"{self._root}/{name}")

    def fetch(self, folder: Path) -> None:
        """Copy the run into a folder. Raises StorageError."""
        try:
            index = json.loads(self.files.cat_file(f"{self._root}/{INDEX}"))
            for place in self.files.find(self._root):
                name = place.removeprefix(self._root).lstrip("/")
                parts = name.split("/")
                own = parts[0] != CHECKPOINTS or parts[1] in (*index["files"], "index.json")
                if own and not parts[-1].startswith(TEMPORARY):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self.files.get_file(place, str(folder / name))
            checkpoints = folder / CHECKPOINTS
            for name, entry in index["names"].items():
                link_or_copy(checkpoints / entry["file"], checkpoints / f"{name}.pt")
        except Exception as error:  # each kind of storage has its own
            raise StorageError(f"cannot read the run at {self.address}: {error!r}") from error

    def _put(self, content: bytes, name: str) -> None:
        """Replace a file, so that it is whole at any moment."""
        place = f"{self._root}/{name}"
        folder, _, last = place.rpartition("/")
        self.files.makedirs(folder, exist_ok=True)
        self.files.pipe_file(f"{folder}/{TEMPORARY}{last}", content)
        self.files.mv(f"{folder}/{TEMPORARY}{last}", place)

    def _checkpoints(self) -> dict[str, int]:
        """Return the sizes of the checkpoint files that are there, by name."""
        place = f"{self._root}/{CHECKPOINTS}"
        found = self.files.find(place, detail=True) if self.files.exists(place) else {}
        return {path.removeprefix(self._root).lstrip("/"): f["size"] for path, f in found.items()}


def _files(folder: Path) -> list[Path]:
    """Return the files of a run that are whole, and belong to no process."""
    every = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [p for p in every if p.name != LOCK_FILE and not p.name.startswith(TEMPORARY)]
