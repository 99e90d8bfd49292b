"""A copy of a run directory at an address that fsspec opens: s3://..., gs://..., file://..."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec

from regimen.conf.addresses import check_protocol
from regimen.conf.errors import ConfigError, truncated_list
from regimen.conf.json_text import plain_json
from regimen.trainer.errors import StorageError
from regimen.trainer.files.atomic import TEMPORARY, link_or_copy
from regimen.trainer.files.names import leads_out, path_below
from regimen.trainer.runs.directory import OF_A_RUN
from regimen.trainer.runs.lock import LOCK_FILE
from regimen.trainer.runs.status import CHECKPOINTS, MANIFEST

INDEX = f"{CHECKPOINTS}/index.json"
_PATIENCE = 10.0  # seconds for an address to answer
_log = logging.getLogger(__name__)


def check_address(address: str) -> None:
    """Raise ConfigError for an address that no file system here is for; it is not reached.

    A person has said it: no file does.
    """
    check_protocol(address, trusted=True)
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(address))
    except (ImportError, ValueError) as error:
        raise ConfigError("", f"{address} cannot be opened: {error}") from error


class Remote:
    """The run at an address; its `index.json` names only checkpoints that are there whole."""

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address
        self.files, root = fsspec.url_to_fs(address)
        self._root = root.rstrip("/")

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
        kept = plain_json(listed)["files"].keys()
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

    def index(self) -> dict[str, Any]:
        """Return what the run's index holds. Raises StorageError."""
        try:
            return dict(plain_json(self.files.cat_file(f"{self._root}/{INDEX}")))
        except Exception as error:  # each kind of storage has its own
            raise StorageError(f"cannot read the run at {self.address}: {error!r}") from error

    def fetch(self, folder: Path) -> None:
        """Copy the run into a folder: what a run has, whatever else is listed.

        Raises StorageError, for a name that leads out of the folder before anything is copied.
        """
        index, checkpoints = self.index(), folder / CHECKPOINTS
        try:
            kept = {path_below(checkpoints, name).name for name in index["files"]}
            names = {
                path_below(checkpoints, f"{name}.pt"): path_below(checkpoints, entry["file"])
                for name, entry in index["names"].items()
            }
            found, others = self._listed(folder, {*kept, "index.json"})
            manifest = found.pop(folder / MANIFEST, None)
            if manifest is None:
                raise FileNotFoundError(f"it has no {MANIFEST}, so that it holds no whole run")
            for path, place in found.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(place, str(path))
            for path, file in names.items():
                link_or_copy(file, path)
            self.files.get_file(manifest, str(folder / MANIFEST))  # last: the run exists with it
        except Exception as error:  # each kind of storage has its own
            raise StorageError(f"cannot read the run at {self.address}: {error!r}") from error
        if others:
            _log.info(
                "%s: left there, since no run has them: %s", self.address, truncated_list(others)
            )

    def _listed(self, folder: Path, kept: set[str]) -> tuple[dict[Path, str], list[str]]:
        """Return where the files of the run go, with their places; and what is no run's.

        `kept`: of the checkpoints. Raises ValueError for a name that leads out of the folder.
        """
        found, others = dict[Path, str](), list[str]()
        for place, facts in self.files.find(self._root, detail=True).items():
            path = path_below(folder, place.removeprefix(f"{self._root}/"))
            parts = path.relative_to(folder).parts
            if parts[0] not in OF_A_RUN or facts.get("islink"):
                others.append(place)
            elif parts[-1].startswith(TEMPORARY):
                continue
            elif parts[0] != CHECKPOINTS or parts[1] in kept:
                found[path] = place
        return found, others

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
    own = (path for path in every if not leads_out(path, folder))
    return [p for p in own if p.name != LOCK_FILE and not p.name.startswith(TEMPORARY)]
