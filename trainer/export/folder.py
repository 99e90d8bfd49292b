"""The folder of an export: complete under its name, or absent (I7)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ModelError
from trainer.files.atomic import sync_folder
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
        made = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield made, folder
        made.chmod(0o777 & ~_umask())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
