"""Find image files in folder trees, whatever else lies there."""

import os
from pathlib import Path

from data.errors import DataError

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)


def folders_of(folder: Path) -> list[str]:
    """Return the names of the folders that are not hidden, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and _is_folder(e)]
    except OSError as error:
        raise DataError(f"data.root: cannot list {folder}: {error.strerror}") from error
    return sorted(names)


def files_below(folder: Path, name: str, ignored: list[str]) -> list[str]:
    """Return the image files at any depth below folder/name, each real folder visited once.

    What carries an image's name is listed even if it is a dangling link: it fails when read.
    """
    found: list[str] = []
    visited: set[str] = set()
    waiting = [name]
    while waiting:
        here = waiting.pop()
        real = os.path.realpath(folder / here)
        if real in visited:
            continue
        visited.add(real)
        for entry in _entries(folder / here):
            relative = os.path.join(here, entry.name)
            if _is_folder(entry):
                waiting.append(relative)
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                found.append(relative)
            else:
                ignored.append(relative)
    return sorted(found)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith(".")),
                key=lambda entry: entry.name,
            )
    except OSError as error:
        raise DataError(f"data.root: cannot list {folder}: {error.strerror}") from error
