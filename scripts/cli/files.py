"""Files and folders that a command writes where the user says: whole or absent."""

import os
from pathlib import Path

from regimen.conf.errors import ConfigError
from regimen.trainer.files.atomic import storing, write_text


def make_above(path: Path) -> None:
    """Make the folders above a path, if they are below the working folder.

    Raises ConfigError for a missing folder elsewhere, which is most likely a typing error, and for
    a file in the place of a folder; StorageError.
    """
    folder = path.parent
    existing = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not existing.is_dir():
        raise ConfigError(f"{existing} exists: choose another name")
    if folder.is_dir():
        return
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(os.curdir)):
        raise ConfigError("", f"{path}: there is no folder {folder}", "make it first")
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)


def write_new(path: Path, text: str) -> None:
    """Write a file, never over one that exists. Raises ConfigError, StorageError."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists: choose another name")
    make_above(path)
    write_text(path, text)
