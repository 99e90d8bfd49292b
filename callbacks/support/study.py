"""The Optuna study of a search: its storage, its pruner, and its errors in one line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, Problem
from trainer.errors import CheckpointError, RunError, StorageError

PRUNERS = {
    "median": "MedianPruner",
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}
PRUNER = "pruner"  # the study's attribute: name and options
PRUNED_AT = "pruned_at"  # a trial's attribute: the step at which its job was told to end
_DATABASE = (".db", ".sqlite", ".sqlite3")
_NO_PLACE = ("ArgumentError", "NoSuchModuleError")  # of SQLAlchemy: the URL is wrong
_DAMAGED = ("not a database", "malformed", "no such table", "no such column")


def import_optuna() -> Any:
    """Import Optuna. Raises ConfigError with the command that installs it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        message = "sweep=optuna takes the package optuna: pip install optuna"
        raise ConfigError(Problem("sweep", message)) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(place: str, must_exist: bool = False) -> Any:
    """Open a study's storage: a URL, an SQLite file (`.db`), or else a journal.

    With `must_exist` nothing is created or repaired. Raises ConfigError for an invalid place,
    CheckpointError for a damaged or missing one, StorageError for one that is locked or cannot be
    written.
    """
    optuna = import_optuna()
    place = as_url(place)
    path = storage_file(place)
    if must_exist and path is not None and not path.exists():
        raise CheckpointError(f"{place}: the study that the job belongs to is gone")
    with study_errors(place, opening=True):
        if "://" in place:
            return optuna.storages.RDBStorage(place)
        backend = optuna.storages.journal.JournalFileBackend(place)
        if not must_exist:
            _cut_torn_line(Path(place), optuna)
        return optuna.storages.JournalStorage(backend)


def as_url(place: str) -> str:
    """Return a place in the form of Optuna's own programs: an SQLite file by its URL."""
    database = "://" not in place and Path(place).suffix in _DATABASE
    return f"sqlite:///{place}" if database else place


def storage_file(place: str) -> Path | None:
    """Return the file of a storage; None for a database elsewhere."""
    kind, separator, rest = place.partition("://")
    if not separator:
        return Path(place)
    return Path(rest.removeprefix("/").partition("?")[0]) if kind == "sqlite" and rest else None


def _cut_torn_line(path: Path, optuna: Any) -> None:
    """Remove an incomplete last line, left by a full disk or a kill, before the next is added."""
    journal = optuna.storages.journal
    with journal._file.get_lock_file(journal.JournalFileSymlinkLock(str(path))):
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


@contextmanager
def study_errors(place: str, opening: bool = False) -> Iterator[None]:
    """Raise errors of a storage as ours; `opening`: the whole study is read."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        if (found := _known(place, error, opening)) is None:
            raise
        raise found from error


def _reason(error: BaseException) -> str:
    lines = str(getattr(error, "orig", None) or error).splitlines() or [""]
    # The text of a KeyError and of some others is a number alone.
    plain = not lines[0] or any(map(str.isalpha, lines[0]))
    return lines[0] if plain else f"{type(error).__name__} {lines[0]}"


def _known(place: str, error: Exception, opening: bool) -> Exception | None:
    chain = [error, error.__cause__, error.__context__]
    reasons = (_reason(e) for e in reversed(chain) if e)
    reason = next(filter(None, reasons), type(error).__name__)
    kind = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError):
        return StorageError(f"cannot use the study {place}: {error.strerror or error}")
    if isinstance(error, ImportError) or type(error).__name__ in _NO_PLACE:
        return ConfigError(Problem("sweep.storage", f"{place} cannot be opened: {reason}"))
    damaged = any(word in reason for word in _DAMAGED)
    if kind in ("sqlalchemy", "alembic", "sqlite3", "optuna") and not damaged:
        hint = " (another process holds it: wait for that one, or end it)"
        locked = hint if "locked" in reason else ""
        return StorageError(f"cannot use the study {place}: {reason}{locked}")
    if damaged or (opening and isinstance(error, ValueError | LookupError | AssertionError)):
        return CheckpointError(
            f"the study {place} is damaged ({reason}): move it away, and the search starts anew "
            "beside the jobs that have finished"
        )
    return None


def build_pruner(name: str | None, options: Mapping[str, Any]) -> Any:
    """Return a pruner by its name in `PRUNERS`; None: no pruning. Raises ConfigError."""
    pruners = import_optuna().pruners
    if name is None:
        return pruners.NopPruner()
    return construct(getattr(pruners, PRUNERS[name]), options, "sweep.pruner_options")


def construct(kind: Any, options: Mapping[str, Any], key: str, **fixed: Any) -> Any:
    """Call a class of Optuna's with options of the configuration. Raises ConfigError."""
    known = [n for n in inspect.signature(kind).parameters if n not in fixed]
    hint = f"it has {', '.join(known)}"
    problems = [
        Problem(f"{key}.{name}", f"{kind.__name__} has no such option", hint)
        for name in options
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    try:
        return kind(**options, **fixed)
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem(key, f"{kind.__name__}: {error}")) from error
    except ImportError as error:
        package = getattr(error, "name", None) or "cmaes"
        raise ConfigError(Problem(key, f"takes a package: pip install {package}")) from error
