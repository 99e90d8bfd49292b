"""The files of a run directory that a tracker is given, and what is shown as files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from callbacks.support.drawing import png
from trainer.files.atomic import TEMPORARY
from trainer.media import Histogram, PRCurve
from trainer.runs.lock import LOCK_FILE

_OF_SERVICES = ("trackers", "wandb")  # folders


def run_files(run: Path) -> list[Path]:
    """Return the files of a run, the small ones first; of several names of one file the first.

    Left out are what trackers keep there, locks and files that are being written.
    """
    sizes: dict[tuple[int, int], tuple[int, Path]] = {}
    for path in sorted(_walk(run)):
        status = path.stat()
        sizes.setdefault((status.st_dev, status.st_ino), (status.st_size, path))
    return [path for _, path in sorted(sizes.values())]


def within(files: Sequence[Path], megabytes: float) -> tuple[list[Path], list[Path]]:
    """Return the files that together stay below a size, and those that do not fit."""
    taken: list[Path] = []
    left = megabytes * 1e6
    for path in files:
        if (size := path.stat().st_size) <= left:
            taken.append(path)
            left -= size
    return taken, [path for path in files if path not in taken]


def listing(run: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return path, URI and size of files."""
    return [
        {"path": str(p.relative_to(run)), "uri": p.as_uri(), "bytes": p.stat().st_size}
        for p in files
    ]


def as_file(value: Any) -> tuple[str, bytes]:
    """Return the ending and the content of the file that shows an image, a text or a curve."""
    if isinstance(value, str):
        return "md", value.encode()
    if isinstance(value, Histogram):
        edges = value.edges[:-1], value.edges[1:]
        return "csv", _table(("left", "right", "count"), *edges, value.counts)
    if isinstance(value, PRCurve):
        names = "threshold", "precision", "recall"
        return "csv", _table(names, value.thresholds, value.precision, value.recall)
    return "png", png(value)


def _table(names: Sequence[str], *columns: Any) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*(np.asarray(column).tolist() for column in columns), strict=True))
    return file.getvalue().encode()


def _walk(run: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(run):
        if Path(folder) == run:
            folders[:] = [name for name in folders if name not in _OF_SERVICES]
        for name in names:
            path = Path(folder) / name
            if name != LOCK_FILE and not name.startswith(TEMPORARY) and not path.is_symlink():
                yield path
