"""Names that come from outside (a listing, an index, a received run) as paths, or refused."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any


class ForeignNameError(ValueError):
    """A name from outside is none of a file below its folder."""


def path_below(folder: Path, name: Any) -> Path:
    """Return the path that `name`, a value from outside, has below `folder`; it may be missing.

    The name is relative, with slashes between its parts. Raises ForeignNameError for anything but
    such a text, and where a link leads out of the folder.
    """
    path = folder / checked_name(name)
    if leads_out(path, folder):
        raise ForeignNameError(f"{name[:100]!r} is a link that leads out of {folder}")
    return path


def checked_name(name: Any) -> str:
    """Return a value from outside that is a relative name without a way up.

    For a name whose file is replaced, and never opened; any other goes through `path_below`. Raises
    ForeignNameError.
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
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and leads_out(path, folder):
                yield path
