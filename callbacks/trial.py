"""A job of a search: it reports to its Optuna study, which may end it early; and that study."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regimen.callbacks.support import Monitor, logger
from regimen.conf.errors import ConfigError, Problem
from regimen.trainer.callback import Callback, Trainer
from regimen.trainer.errors import CheckpointError, RunError, StorageError
from regimen.trainer.state import PRUNED

_PRUNERS = {
    None: "NopPruner",
    "median": "MedianPruner",
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}
PRUNER = "pruner"  # the study's attribute: name and options
PRUNED_AT = "pruned_at"  # attribute of a trial: the step at which its end was decided
_DATABASE = (".db", ".sqlite", ".sqlite3")
_NO_PLACE = ("ArgumentError", "NoSuchModuleError")  # of SQLAlchemy: the URL is wrong
_LIBRARIES = ("sqlalchemy", "alembic", "sqlite3", "optuna")
_DAMAGED = ("not a database", "malformed", "no such table", "no such column")


class Trial(Callback):
    """Report the study's metric at each validation, and end the run where the pruner says so.

    `storage` and `study` name the study, `number` its trial. What is reported belongs to an epoch,
    or to a step if `trainer.validate_every_n_steps` is set. A metric of the training is reported
    once an epoch. The main process reports and decides for all. A study that cannot be written
    while the run trains is a warning: the run goes on without it.
    """

    def __init__(self, storage: str, study: str, number: int) -> None:
        self._place, self._name, self._number = storage, study, number
        self._metric = ""
        self._trial: Any = None
        self._pruned_at: int | None = None  # step
        self._reported_at = -1  # step

    def setup(self, trainer: Trainer) -> None:
        """Open the study. Raises CheckpointError if it is gone, StorageError if it is locked."""
        trainer.group.run_on_main(self._open)
        self._metric = trainer.group.broadcast(self._metric)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat the end that was decided on when the checkpoint was saved."""
        at = trainer.group.broadcast(self._pruned_at)
        if at is not None and trainer.state.global_step >= at:
            trainer.state.request_stop(PRUNED)

    def on_boundary(self, trainer: Trainer) -> None:
        """Report the metric, where there is a new value."""
        state = trainer.state
        if not Monitor(self._metric, compared=False).is_new(state, self._reported_at):
            return
        self._reported_at = state.global_step
        if trainer.group.broadcast(trainer.is_main and self._ends_here(trainer)):
            state.request_stop(PRUNED)

    def _ends_here(self, trainer: Trainer) -> bool:
        if (value := trainer.metrics.get(self._metric)) is None:
            logger.warning("warning: %s is not logged: the search learns nothing", self._metric)
            return False
        at = trainer.state.global_step
        step = at if trainer.options.validate_every_n_steps else trainer.state.epoch
        try:
            with study_errors(self._place):
                seen = self._trial.study.get_trials(deepcopy=False)[self._number]
                if seen.state.is_finished() or step < (seen.last_step or 0):
                    return False  # repeated after a resume: decided then
                if step not in seen.intermediate_values:
                    self._trial.report(value, step)
                if trainer.done or not self._trial.should_prune():
                    return False
                self._trial.set_user_attr(PRUNED_AT, at)
        except RunError as error:
            logger.warning("warning: %s: this validation is not reported to it", error)
            return False
        logger.info("pruned: %s %.6g at step %d is behind the other jobs", self._metric, value, at)
        return True

    def _open(self) -> None:
        optuna = import_optuna()
        storage = open_storage(self._place, must_exist=True)
        with study_errors(self._place):
            sampler = optuna.samplers.RandomSampler(seed=0)  # it is asked for nothing
            try:
                study = optuna.load_study(study_name=self._name, storage=storage, sampler=sampler)
                found = study.get_trials(deepcopy=False)[self._number]
                (self._metric,) = study.metric_names
            except (LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{self._place} has no trial {self._number} of {self._name!r}, or does not say "
                    "which metric is its value: go on with the job by itself, without sweep.trial"
                ) from error
            study.pruner = build_pruner(**study.user_attrs.get(PRUNER, {}))
            self._trial = optuna.trial.Trial(study, found._trial_id)
            self._pruned_at = found.user_attrs.get(PRUNED_AT)


def import_optuna() -> Any:
    """Import Optuna. Raises ConfigError with the command that installs it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        message = "sweep=optuna takes the package optuna: pip install optuna"
        raise ConfigError("sweep", message) from None
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
    except Exception as error:
        cause = error.__cause__ or error.__context__ or error
        first = (str(getattr(cause, "orig", cause)).splitlines() or [""])[0]
        reason = f"{type(cause).__name__}: {first}"  # of a KeyError alone a number
        unread = opening and isinstance(error, ValueError | LookupError | AssertionError)
        if isinstance(error, ImportError) or type(error).__name__ in _NO_PLACE:
            raise ConfigError("sweep.storage", f"{place} cannot be opened: {reason}") from error
        if unread or any(word in reason for word in _DAMAGED):
            raise CheckpointError(
                f"the study {place} is damaged ({reason}): move it away, and the search starts "
                "anew beside the jobs that have finished"
            ) from error
        library = type(error).__module__.partition(".")[0] in _LIBRARIES
        if library or isinstance(error, OSError):
            raise StorageError(f"cannot use the study {place}: {reason}") from error
        raise


def build_pruner(name: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Return a pruner by its name in `sweep.pruner`; None: no pruning. Raises ConfigError."""
    kind = getattr(import_optuna().pruners, _PRUNERS[name])
    return construct(kind, (options or {}) if name else {}, "sweep.pruner_options")


def construct(kind: Any, options: Mapping[str, Any], key: str, **fixed: Any) -> Any:
    """Call a class of Optuna's with options of the configuration. Raises ConfigError."""
    known = [n for n in inspect.signature(kind).parameters if n not in fixed]
    message, hint = f"{kind.__name__} has no such option", f"it has {', '.join(known)}"
    if wrong := [Problem(f"{key}.{name}", message, hint) for name in options if name not in known]:
        raise ConfigError(wrong)
    try:
        return kind(**options, **fixed)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"{kind.__name__}: {error}") from error
    except ImportError as error:
        package = getattr(error, "name", None) or "cmaes"
        raise ConfigError(key, f"takes a package: pip install {package}") from error
