"""Names that come from outside (a listing, an index, a received run) as paths, or refused."""

import os
import re
from pathlib import Path, PureWindowsPath
from typing import Any


class ForeignNameError(ValueError):
    """A name from outside is none of a file below its folder."""


def path_below(folder: Path, name: Any) -> Path:
    """Return the path that `name`, a value from outside, has below `folder`; it may be missing.

    The name is relative, with slashes between its parts. Raises ForeignNameError for anything but
    such a text, and where a link leads out of the folder.
    """
    if not isinstance(name, str):
        raise ForeignNameError(f"{name!r:.100} is no name of a file")
    parts = re.split(r"[/\\]", name)
    if "\0" in name or {"", ".", ".."} & {*parts} or PureWindowsPath(name).drive:
        raise ForeignNameError(f"{name[:100]!r} is no name of a file below {folder}")
    try:
        place = Path(os.path.realpath(folder / name))
    except ValueError as error:  # letters that no file system takes (lone surrogates)
        raise ForeignNameError(f"{name[:100]!r} is no name of a file: {error}") from error
    if not place.is_relative_to(os.path.realpath(folder)):
        raise ForeignNameError(f"{name[:100]!r} is a link that leads out of {folder}")
    return folder / name
