"""Where each key of a composed configuration was written."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.errors import Problem
from conf.yaml_file import Document, examine

_SHIPPED = Path(__file__).resolve().parents[2] / "conf"


@dataclass(slots=True)
class Notes:
    """The files that were read, each once, and their problems."""

    documents: dict[Path, Document] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def read(self, path: Path) -> Document:
        """Read and check a file, once."""
        if path not in self.documents:
            document = examine(path, shown_path(path))
            self.documents[path] = document
            self.problems += document.problems
        return self.documents[path]

    @property
    def readable(self) -> bool:
        """Return whether all files could be read."""
        return all(document.readable for document in self.documents.values())


@dataclass(frozen=True, slots=True)
class Placed:
    """A file, and the key below which its content is merged."""

    path: Path
    package: str
    primary: bool = False  # the file that the composition starts with


@dataclass(slots=True)
class Origins:
    """The files of a composition, in the order in which they were merged, and the overrides."""

    notes: Notes
    files: list[Placed] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)  # by key, as typed
    taken_from: dict[str, str] = field(default_factory=dict)  # by key: `${...}` and nothing else

    def of(self, key: str) -> str | None:
        """Return where a key was last set: the command line, or file:line; None if not at all."""
        for name in _upwards(key):
            if name in self.overrides:
                return f"command line: {self.overrides[name]}"
        below = next((o for k, o in self.overrides.items() if k.startswith(key + ".")), None)
        if below is not None:
            return f"command line: {below}"
        return next((found for name in _upwards(key) if (found := self._file(name))), None)

    def of_user(self, key: str) -> bool:
        """Return whether the command line sets something in a node, or a file is not a shipped one.

        Shipped files are correct together.
        """
        if any(not placed.path.is_relative_to(_SHIPPED) for placed in self.files):
            return True
        typed = self.overrides
        return any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in typed)

    def setters(self, key: str) -> list[int]:
        """Return the numbers of the files that set a key; the command line is the last number."""
        files = [n for n, placed in enumerate(self.files) if self._sets(placed, key)]
        typed = any(f"{other}.".startswith(f"{key}.") for other in self.overrides)
        return [*files, len(self.files)] if typed else files

    def _sets(self, placed: Placed, key: str) -> bool:
        own = _below(key, placed.package)
        if own is None:
            return placed.package.startswith(f"{key}.")
        return own == "" or own in self.notes.read(placed.path).lines

    def within(self, number: int, key: str) -> bool:
        """Return whether a file's content is merged within the node at `key`."""
        return number < len(self.files) and _below(self.files[number].package, key) is not None

    def declares(self, section: str, name: str) -> bool:
        """Return whether a file of a group, or the primary file, has a key in a section."""
        return any(
            self._sets(placed, f"{section}.{name}")
            for placed in self.files
            if placed.primary or placed.package == section
        )

    def _file(self, key: str) -> str | None:
        for placed in reversed(self.files):
            lines = self.notes.read(placed.path).lines
            own = _below(key, placed.package)
            if own in lines:
                return f"{shown_path(placed.path)}:{lines[own]}"
            if own == "" and placed.package:
                return shown_path(placed.path)
        return None

    def located(self, problem: Problem) -> Problem:
        """Return a problem with the file and line of its key."""
        return (
            problem if problem.file else replace(problem, file=self.of(self._source(problem.key)))
        )

    def _source(self, key: str) -> str:
        """Follow interpolations to the key that holds the value, if a user wrote that one."""
        seen, source = {key}, key
        while (source := self.taken_from.get(source, "")) not in seen and source:
            seen.add(source)
            where = self.of(source) or ""
            if where.startswith("command line"):
                return source
        return key


def _upwards(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _below(key: str, package: str) -> str | None:
    """Return the part of `key` below `package`: '' for the package itself, None if outside."""
    if not package:
        return key
    if key == package:
        return ""
    return key.removeprefix(package + ".") if key.startswith(package + ".") else None


def shown_path(path: Path) -> str:
    """Return a path for a message: relative if that is shorter."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):
        return str(path)
    return str(path) if relative.startswith("..") else relative
