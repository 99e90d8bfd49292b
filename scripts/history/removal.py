"""Which runs may go, and how they go: never the best of a name, never one that is running."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from callbacks.support.errors import CallbackError
from callbacks.support.monitor import Monitor
from scripts.history.entry import RunEntry
from trainer.files.storage import storage_error
from trainer.runs.lock import RunLock
from trainer.runs.status import MANIFEST

_GOOD = ("finished", "pruned", "stopped", "running")


def removable(runs: Sequence[RunEntry], keep: int | None = None) -> list[RunEntry]:
    """Return the runs that did not end well, and with `keep` all but so many best of each name.

    The best of a name, and of those of one name with another metric, always stays. So does a run
    whose directory holds other runs, or the working folder.
    """
    best = {run.path for group in _groups(runs) for run in _best_of(group, keep or 1)}
    chosen = [
        run
        for run in runs
        if run.path not in best
        and not run.running
        and (run.state not in _GOOD or (keep is not None and run.best is not None))
    ]
    places = [run.path.resolve() for run in runs] + [Path.cwd()]
    return [run for run in chosen if not _holds(run.path, places)]


def remove(run: RunEntry) -> bool:
    """Remove a run's directory; return False, and leave it, if a process holds it by now.

    Raises StorageError.
    """
    lock = RunLock(run.path)
    if lock.acquire() is not None:
        return False
    try:
        (run.path / MANIFEST).unlink(missing_ok=True)  # first: from here on it is no run
        shutil.rmtree(run.path)
    except OSError as error:
        raise storage_error(run.path, error) from error
    finally:
        lock.release()
    return True


def _holds(path: Path, places: Sequence[Path]) -> bool:
    here = path.resolve()
    inside = [place for place in places if place.is_relative_to(here)]
    return len(inside) > 1


def _groups(runs: Sequence[RunEntry]) -> list[list[RunEntry]]:
    """Return the runs that have a value, by name and metric."""
    groups: dict[tuple[str, str], list[RunEntry]] = {}
    for run in runs:
        if run.best is not None:
            groups.setdefault((run.name, run.best[0]), []).append(run)
    return list(groups.values())


def _best_of(runs: Sequence[RunEntry], number: int) -> Sequence[RunEntry]:
    """Return the best runs of one metric; all of them where nobody knows which values are."""

    def rank(run: RunEntry) -> float:
        assert run.best is not None
        return Monitor(run.best[0], run.mode).rank(run.best[1])

    try:
        return sorted(runs, key=rank)[:number]
    except CallbackError:
        return runs
