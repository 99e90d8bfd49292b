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
PRUNED_AT = "pruned_at"  # attribute of a trial: the step at which its end was decided
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

    Raises ConfigError for an invalid place, CheckpointError for a damaged one, or with `must_exist`
    a missing one, StorageError for one that is locked or cannot be written.
    """
    storages = import_optuna().storages
    if must_exist and "://" not in place and not Path(place).exists():
        raise CheckpointError(f"{place}: the study that the job belongs to is gone")
    place = as_url(place)
    with study_errors(place, opening=True):
        if "://" in place:
            return storages.RDBStorage(place)
        if Path(place).exists():
            with Path(place).open("rb") as file:
                if not is_journal(file.readline()):
                    raise ValueError("it is no journal of a study")
        return storages.JournalStorage(storages.journal.JournalFileBackend(place))


def is_journal(content: bytes) -> bool:
    """Return whether the begin of a file is that of a journal, or nothing yet."""
    first = content.partition(b"\n")[0]
    return not first or (first.startswith(b"{") and b'"op_code"' in first)


def as_url(place: str) -> str:
    """Return a place in the form of Optuna's own programs: an SQLite file by its URL."""
    database = "://" not in place and Path(place).suffix in _DATABASE
    return f"sqlite:///{place}" if database else place


@contextmanager
def study_errors(place: str, opening: bool = False) -> Iterator[None]:
    """Raise errors of a storage as ours; `opening`: the whole study is read."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except OSError as error:
        raise StorageError(f"cannot use the study {place}: {error.strerror or error}") from error
    except Exception as error:
        cause = error.__cause__ or error.__context__ or error
        reason = (str(getattr(cause, "orig", cause)).splitlines() or [""])[0]
        if not any(map(str.isalpha, reason)):  # that of a KeyError and some others is a number
            reason = f"{type(cause).__name__} {reason}"
        damaged = any(word in reason for word in _DAMAGED)
        damaged = damaged or (
            opening and isinstance(error, ValueError | LookupError | AssertionError)
        )
        kind = type(error).__module__.partition(".")[0]
        if isinstance(error, ImportError) or type(error).__name__ in _NO_PLACE:
            problem = Problem("sweep.storage", f"{place} cannot be opened: {reason}")
            raise ConfigError(problem) from error
        if damaged:
            raise CheckpointError(
                f"the study {place} is damaged ({reason}): move it away, and the search starts "
                "anew beside the jobs that have finished"
            ) from error
        if kind in ("sqlalchemy", "alembic", "sqlite3", "optuna"):
            held = " (another process holds it: wait for that one, or end it)"
            locked = held if "locked" in reason else ""
            raise StorageError(f"cannot use the study {place}: {reason}{locked}") from error
        raise


def build_pruner(name: str | None, options: Mapping[str, Any]) -> Any:
    """Return a pruner by its name in `PRUNERS`; None: no pruning. Raises ConfigError."""
    pruners = import_optuna().pruners
    if name is None:
        return pruners.NopPruner()
    return construct(getattr(pruners, PRUNERS[name]), options, "sweep.pruner_options")


def construct(kind: Any, options: Mapping[str, Any], key: str, **fixed: Any) -> Any:
    """Call a class of Optuna's with options of the configuration. Raises ConfigError."""
    known = [n for n in inspect.signature(kind).parameters if n not in fixed]
    message, hint = f"{kind.__name__} has no such option", f"it has {', '.join(known)}"
    wrong = [Problem(f"{key}.{name}", message, hint) for name in options if name not in known]
    if wrong:
        raise ConfigError(wrong)
    try:
        return kind(**options, **fixed)
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem(key, f"{kind.__name__}: {error}")) from error
    except ImportError as error:
        package = getattr(error, "name", None) or "cmaes"
        raise ConfigError(Problem(key, f"takes a package: pip install {package}")) from error
