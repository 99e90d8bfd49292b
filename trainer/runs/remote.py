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
from regimen.trainer.runs.directory import RUN_FILES
from regimen.trainer.runs.lock import LOCK_FILE
from regimen.trainer.runs.status import CHECKPOINTS, MANIFEST

INDEX = f"{CHECKPOINTS}/index.json"
_PATIENCE = 10.0  # seconds for an address to answer
_log = logging.getLogger(__name__)


def check_address(address: str) -> None:
    """Raise ConfigError for an address that no installed file system opens; nothing is connected.

    The address is trusted: it comes from a command line, and never from a file.
    """
    check_protocol(address, trusted=True)
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(address))
    except (ImportError, ValueError) as error:
        raise ConfigError("", f"{address} cannot be opened: {error}") from error


class Remote:
    """The run at an address; its `index.json` lists only checkpoints that are complete there."""

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address
        self.files, root = fsspec.url_to_fs(address)
        self._root = root.rstrip("/")

    def probe(self) -> None:
        """Write and remove a file. Raises StorageError, after ten seconds without an answer."""
        failures: list[Exception] = [TimeoutError(f"no answer within {_PATIENCE:g} s")]

        def try_to_write() -> None:
            try:
                self._put(b"", f"{TEMPORARY}probe")
                self.files.rm_file(self._remote_path(f"{TEMPORARY}probe"))
                failures.clear()
            except Exception as error:  # each kind of storage has its own
                failures[:] = [error]

        # A daemon: it may never return, and must not keep the process alive.
        thread = Thread(target=try_to_write, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        for error in failures:
            raise StorageError(f"cannot write to {self.address}: {error}") from error

    def send(self, folder: Path) -> None:
        """Copy what is new of a run: logs and settings, checkpoints, then the index.

        Checkpoints that the index no longer lists are removed after that. The copying may stop at
        any moment: until the end the index describes the run as it was before.
        """
        index = (folder / INDEX).read_bytes()
        listed = plain_json(index)["files"].keys()
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if name.split("/")[0] != CHECKPOINTS:
                self._put(path.read_bytes(), name)

        sizes = self._checkpoint_sizes()
        for path in _files(folder / CHECKPOINTS):
            name = path.relative_to(folder).as_posix()
            if name.split("/")[1] in listed and sizes.get(name) != path.stat().st_size:
                target = self._remote_path(name)
                self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(path), target)
        self._put(index, INDEX)
        for name in self._checkpoint_sizes():  # also what an interrupted copy has left
            if name.split("/")[1] not in (*listed, "index.json"):
                self.files.rm_file(self._remote_path(name))

    def index(self) -> dict[str, Any]:
        """Return the content of the run's index. Raises StorageError."""
        try:
            return dict(plain_json(self.files.cat_file(self._remote_path(INDEX))))
        except Exception as error:  # each kind of storage has its own
            raise StorageError(f"cannot read the run at {self.address}: {error!r}") from error

    def fetch(self, folder: Path) -> None:
        """Copy the run into a folder: the files that a run has, whatever else is listed.

        Raises StorageError, for a name that leads out of the folder before anything is copied.
        """
        index = self.index()
        checkpoints = folder / CHECKPOINTS
        try:
            listed = {path_below(checkpoints, name).name for name in index["files"]}
            links = {
                path_below(checkpoints, f"{name}.pt"): path_below(checkpoints, entry["file"])
                for name, entry in index["names"].items()
            }
            sources, skipped = self._sources(folder, {*listed, "index.json"})
            manifest = sources.pop(folder / MANIFEST, None)
            if manifest is None:
                raise FileNotFoundError(f"it has no {MANIFEST}, so that it holds no whole run")
            for path, source in sources.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(source, str(path))
            for path, file in links.items():
                link_or_copy(file, path)
            self.files.get_file(manifest, str(folder / MANIFEST))  # last: the run exists with it
        except Exception as error:  # each kind of storage has its own
            raise StorageError(f"cannot read the run at {self.address}: {error!r}") from error
        if skipped:
            _log.info(
                "%s: left there, since no run has them: %s", self.address, truncated_list(skipped)
            )

    def _sources(self, folder: Path, checkpoints: set[str]) -> tuple[dict[Path, str], list[str]]:
        """Return the remote path of each file to copy, and the remote files that no run has.

        `checkpoints`: the names to copy of that folder. Raises ValueError for a name that leads out
        of the folder.
        """
        sources = dict[Path, str]()
        skipped = list[str]()
        for source, facts in self.files.find(self._root, detail=True).items():
            path = path_below(folder, source.removeprefix(f"{self._root}/"))
            parts = path.relative_to(folder).parts
            if parts[0] not in RUN_FILES or facts.get("islink"):
                skipped.append(source)
            elif parts[-1].startswith(TEMPORARY):
                continue
            elif parts[0] != CHECKPOINTS or parts[1] in checkpoints:
                sources[path] = source
        return sources, skipped

    def _remote_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, content: bytes, name: str) -> None:
        """Replace a file, so that it is whole at any moment."""
        target = self._remote_path(name)
        folder, _, last = target.rpartition("/")
        temporary = f"{folder}/{TEMPORARY}{last}"
        self.files.makedirs(folder, exist_ok=True)
        self.files.pipe_file(temporary, content)
        self.files.mv(temporary, target)

    def _checkpoint_sizes(self) -> dict[str, int]:
        """Return the sizes of the checkpoint files at the address, by name."""
        folder = self._remote_path(CHECKPOINTS)
        if not self.files.exists(folder):
            return {}
        files = self.files.find(folder, detail=True)
        return {path.removeprefix(self._root).lstrip("/"): f["size"] for path, f in files.items()}


def _files(folder: Path) -> list[Path]:
    """Return the files of a run; not temporary ones, its lock, and links that lead out of it."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.name == LOCK_FILE or path.name.startswith(TEMPORARY):
            continue
        if path.is_file() and not leads_out(path, folder):
            files.append(path)
    return files
