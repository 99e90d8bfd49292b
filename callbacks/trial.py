"""The callback of a job of a search, which reports to its Optuna study; and access to studies."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regimen.callbacks.support import Monitor, logger
from regimen.conf.errors import ConfigError, Problem, raise_problems
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
_DATABASE_ENDINGS = (".db", ".sqlite", ".sqlite3")
_INVALID_URL = ("ArgumentError", "NoSuchModuleError")  # errors of SQLAlchemy
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
        self._storage = storage
        self._study_name = study
        self._number = number
        self._metric = ""
        self._trial: Any = None
        self._pruned_at: int | None = None  # step
        self._reported_at = -1  # step

    def setup(self, trainer: Trainer) -> None:
        """Open the study. Raises CheckpointError if it is gone, StorageError if it is locked."""
        # Collectives: the main process alone opens the study.
        trainer.group.run_on_main(self._open)
        self._metric = trainer.group.broadcast(self._metric)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat the end that was decided on when the checkpoint was saved."""
        # A collective: the main process alone has read the study.
        pruned_at = trainer.group.broadcast(self._pruned_at)
        if pruned_at is not None and trainer.state.global_step >= pruned_at:
            trainer.state.request_stop(PRUNED)

    def on_boundary(self, trainer: Trainer) -> None:
        """Report the metric, where there is a new value."""
        state = trainer.state
        if not Monitor(self._metric, compared=False).is_new(state, self._reported_at):
            return
        self._reported_at = state.global_step
        prunes = trainer.is_main and self._report(trainer)
        # A collective: the main process decides for all.
        if trainer.group.broadcast(prunes):
            state.request_stop(PRUNED)

    def _report(self, trainer: Trainer) -> bool:
        """Report the metric to the study; return whether its pruner ends the run."""
        value = trainer.metrics.get(self._metric)
        if value is None:
            logger.warning("warning: %s is not logged: the search learns nothing", self._metric)
            return False
        trial = self._trial
        global_step = trainer.state.global_step
        time = global_step if trainer.options.validate_every_n_steps else trainer.state.epoch
        try:
            with study_errors(self._storage):
                stored = trial.study.get_trials(deepcopy=False)[self._number]
                if stored.state.is_finished() or time < (stored.last_step or 0):
                    return False  # a resumed run repeats what was decided before
                if time not in stored.intermediate_values:
                    trial.report(value, time)
                if trainer.done or not trial.should_prune():
                    return False
                trial.set_user_attr(PRUNED_AT, global_step)
        except RunError as error:
            logger.warning("warning: %s: this validation is not reported to it", error)
            return False
        logger.info(
            "pruned: %s %.6g at step %d is behind the other jobs", self._metric, value, global_step
        )
        return True

    def _open(self) -> None:
        optuna = import_optuna()
        storage = open_storage(self._storage, must_exist=True)
        with study_errors(self._storage):
            try:
                study = optuna.load_study(
                    study_name=self._study_name,
                    storage=storage,
                    sampler=optuna.samplers.RandomSampler(seed=0),  # it samples nothing here
                )
                stored = study.get_trials(deepcopy=False)[self._number]
                (self._metric,) = study.metric_names
            except (LookupError, TypeError) as error:
                raise CheckpointError(
                    f"{self._storage} has no trial {self._number} of {self._study_name!r}, or does "
                    "not say which metric is its value: go on with the job by itself, without "
                    "sweep.trial"
                ) from error
            study.pruner = build_pruner(**study.user_attrs.get(PRUNER, {}))
            self._trial = optuna.trial.Trial(study, stored._trial_id)
            self._pruned_at = stored.user_attrs.get(PRUNED_AT)


def import_optuna() -> Any:
    """Import Optuna. Raises ConfigError with the command that installs it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(
            "sweep", "sweep=optuna takes the package optuna: pip install optuna"
        ) from None
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
    if "://" not in place and Path(place).suffix in _DATABASE_ENDINGS:
        return f"sqlite:///{place}"
    return place


@contextmanager
def study_errors(place: str, opening: bool = False) -> Iterator[None]:
    """Raise errors of a storage as ours; `opening`: the whole study is read."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        reason = _reason(error)
        if isinstance(error, ImportError) or type(error).__name__ in _INVALID_URL:
            raise ConfigError("sweep.storage", f"{place} cannot be opened: {reason}") from error
        is_unreadable = opening and isinstance(error, ValueError | LookupError | AssertionError)
        if is_unreadable or any(words in reason for words in _DAMAGED):
            raise CheckpointError(
                f"the study {place} is damaged ({reason}): move it away, and the search starts "
                "anew beside the jobs that have finished"
            ) from error
        package = type(error).__module__.partition(".")[0]
        if package in _LIBRARIES or isinstance(error, OSError):
            raise StorageError(f"cannot use the study {place}: {reason}") from error
        raise


def _reason(error: Exception) -> str:
    """Return the type of the first cause, and its first line: a KeyError's text is a mere key."""
    cause = error.__cause__ or error.__context__ or error
    text = str(getattr(cause, "orig", cause))  # `orig`: the database's error in SQLAlchemy's
    first_line = next(iter(text.splitlines()), "")
    return f"{type(cause).__name__}: {first_line}"


def build_pruner(name: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Return a pruner by its name in `sweep.pruner`; None: no pruning. Raises ConfigError."""
    kind = getattr(import_optuna().pruners, _PRUNERS[name])
    if name is None or options is None:
        options = {}
    return construct(kind, options, "sweep.pruner_options")


def construct(kind: Any, options: Mapping[str, Any], key: str, **fixed: Any) -> Any:
    """Call a class of Optuna's with options of the configuration. Raises ConfigError."""
    valid = [name for name in inspect.signature(kind).parameters if name not in fixed]
    problems = []
    for name in options:
        if name not in valid:
            problems.append(
                Problem(
                    f"{key}.{name}",
                    f"{kind.__name__} has no such option",
                    f"it has {', '.join(valid)}",
                )
            )
    raise_problems(problems)
    try:
        return kind(**options, **fixed)
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"{kind.__name__}: {error}") from error
    except ImportError as error:
        package = getattr(error, "name", None) or "cmaes"
        raise ConfigError(key, f"takes a package: pip install {package}") from error
