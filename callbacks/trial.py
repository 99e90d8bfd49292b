"""Report a job's validations to the study of its search, which may end the job early."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from callbacks.support.study import (
    PRUNED_AT,
    PRUNER,
    build_pruner,
    import_optuna,
    open_storage,
    study_errors,
)
from trainer.callback import Callback
from trainer.errors import CheckpointError, RunError
from trainer.state import PRUNED

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


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
        trainer.group.on_main(self._open)
        self._metric = trainer.group.broadcast(self._metric)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat the end that was decided on when the checkpoint was saved."""
        at = trainer.group.broadcast(self._pruned_at)
        if at is not None and trainer.state.global_step >= at:
            trainer.state.request_stop(PRUNED)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Report a metric of the validation."""
        if self._metric.startswith("val/"):
            self._look(trainer)

    def on_boundary(self, trainer: Trainer) -> None:
        """Report a metric of the training, at the end of an epoch."""
        state = trainer.state
        at_end = not state.position and state.global_step > self._reported_at
        if at_end and not self._metric.startswith("val/"):
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        self._reported_at = trainer.state.global_step
        ends = trainer.group.broadcast(trainer.is_main and self._ends_here(trainer))
        if ends and not trainer.done:
            trainer.state.request_stop(PRUNED)

    def _ends_here(self, trainer: Trainer) -> bool:
        if (value := trainer.metrics.get(self._metric)) is None:
            _log.warning("warning: %s is not logged: the search learns nothing", self._metric)
            return False
        at = trainer.state.global_step
        step = at if trainer.options.validate_every_n_steps else trainer.state.epoch
        try:
            with study_errors(self._place):
                (seen,) = self._trial.study.get_trials(deepcopy=False)[self._number :][:1]
                if seen.state.is_finished() or step < (seen.last_step or 0):
                    return False  # repeated after a resume: decided then
                if step not in seen.intermediate_values:
                    self._trial.report(value, step)
                if trainer.done or not self._trial.should_prune():
                    return False
                self._trial.set_user_attr(PRUNED_AT, at)
        except RunError as error:
            _log.warning("warning: %s: this validation is not reported to it", error)
            return False
        _log.info("pruned: %s %.6g at step %d is behind the other jobs", self._metric, value, at)
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
            node = study.user_attrs.get(PRUNER) or {"name": None, "options": {}}
            study.pruner = build_pruner(**node)
            self._trial = optuna.trial.Trial(study, found._trial_id)
            self._pruned_at = found.user_attrs.get(PRUNED_AT)
