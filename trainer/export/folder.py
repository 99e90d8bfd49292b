"""The folder of an export: complete under its name, or absent (I7)."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ModelError
from trainer.files.atomic import TEMPORARY, remove_orphans, sync_folder
from trainer.files.storage import storage_error
from trainer.inference.run import Run

FACTS = "export.json"


@contextmanager
def export_folder(
    run: Run, out: Path | None, name: str, overwrite: bool
) -> Iterator[tuple[Path, Path]]:
    """Yield a folder to write into, and its final path, which it gets at the end (I7).

    out: default RUN/exports/NAME. Raises ModelError for a folder that exists and may not be
    replaced, StorageError.
    """
    folder = out or run.path / "exports" / name
    if folder.exists() and not overwrite:
        raise ModelError(f"out={folder} exists: overwrite=true replaces it")
    if folder.exists() and not (folder / FACTS).is_file():
        raise ModelError(f"out={folder} is no export: it has no {FACTS}, so it is not replaced")
    try:
        folder.parent.mkdir(parents=out is None, exist_ok=True)
        if out is None:
            remove_orphans(folder.parent)  # of a command that was killed
        made = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
        held = os.open(made, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield made, folder
        made.chmod(0o777 & ~_umask())
        _replace(made, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _replace(made: Path, folder: Path) -> None:
    """Give a folder its name; one of that name is moved away whole before it is removed."""
    old = made.with_name(f"{made.name}-old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(made, folder)
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
