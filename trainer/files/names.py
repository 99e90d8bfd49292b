"""Check file names that come from outside: a listing, an index, a received run."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any


class ForeignNameError(ValueError):
    """A name from outside does not name a file below its folder."""


def path_below(folder: Path, name: Any) -> Path:
    """Return `folder / name` for a value from outside; the file may be missing.

    Raises ForeignNameError unless the name is a relative path without `..`, with slashes between
    its parts, and no link on the way leads out of the folder.
    """
    path = folder / checked_name(name)
    if leads_out(path, folder):
        raise ForeignNameError(f"{name[:100]!r} is a link that leads out of {folder}")
    return path


def checked_name(name: Any) -> str:
    """Return a value from outside if it is a relative path without `..`.

    Links are not followed: this is for files that are replaced and never opened; use `path_below`
    for all others. Raises ForeignNameError.
    """
    if not isinstance(name, str):
        raise ForeignNameError(f"{name!r:.100} is no name of a file")
    parts = re.split(r"[/\\]", name)
    if "\0" in name or {"", ".", ".."} & {*parts} or PureWindowsPath(name).drive:
        raise ForeignNameError(f"{name[:100]!r} is no name of a file below its folder")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:  # lone surrogates
        raise ForeignNameError(f"{name[:100]!r} is no name of a file: {error}") from error
    return name


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder is really elsewhere, by a link on the way."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def links_out(folder: Path) -> Iterator[Path]:
    """Yield the links anywhere below a folder that lead out of it; none is followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and leads_out(path, folder):
                yield path
