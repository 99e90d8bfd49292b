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

_NO_PRUNER: Mapping[str, Any] = {"name": None, "options": {}}
_log = logging.getLogger(__name__)


class Trial(Callback):
    """Report the study's metric at each validation, and end the run where the pruner says so.

    `storage` and `study` name the study, `number` its trial. What is reported belongs to an epoch,
    or to a step if `trainer.validate_every_n_steps` is set. A metric of the training is reported
    once an epoch. The main process reports and decides for all. A study that cannot be written
    while the run trains is a warning: the run goes on without it.
    """

    def __init__(self, storage: str, study: str, number: int) -> None:
        self._storage_name = storage
        self._study_name = study
        self._number = number
        self._metric = ""
        self._study: Any = None
        self._storage: Any = None
        self._trial_id: Any = None
        self._reported_at = -1  # step

    def setup(self, trainer: Trainer) -> None:
        """Open the study. Raises CheckpointError if it is gone, StorageError if it is locked."""
        trainer.group.on_main(self._open)
        self._metric = trainer.group.broadcast(self._metric)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Repeat the end that was decided on when the checkpoint was saved."""
        at = self._trial().user_attrs.get(PRUNED_AT) if trainer.is_main else None
        at = trainer.group.broadcast(at)
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
        """Report, and return what the pruner decides; on the main process."""
        if (value := trainer.metrics.get(self._metric)) is None:
            _log.warning("warning: %s is not logged: the search learns nothing", self._metric)
            return False
        state, by_step = trainer.state, trainer.options.validate_every_n_steps
        try:
            with study_errors(self._storage_name):
                return self._report(state.global_step if by_step else state.epoch, value, trainer)
        except RunError as error:
            _log.warning("warning: %s: this validation is not reported to it", error)
            return False

    def _report(self, step: int, value: float, trainer: Trainer) -> bool:
        trial = self._trial()
        if trial.state.is_finished() or step < (trial.last_step or 0):
            return False  # repeated after a resume: decided then
        if step not in trial.intermediate_values:
            self._storage.set_trial_intermediate_value(self._trial_id, step, value)
        if trainer.done or not self._study.pruner.prune(self._study, self._trial()):
            return False
        at = trainer.state.global_step
        self._storage.set_trial_user_attr(self._trial_id, PRUNED_AT, at)
        _log.info("pruned: %s %.6g at step %d is behind the other jobs", self._metric, value, at)
        return True

    def _open(self) -> None:
        optuna = import_optuna()
        self._storage = open_storage(self._storage_name, must_exist=True)
        with study_errors(self._storage_name):
            try:
                study_id = self._storage.get_study_id_from_name(self._study_name)
                find = self._storage.get_trial_id_from_study_id_trial_number
                self._trial_id = find(study_id, self._number)
            except KeyError as error:
                raise CheckpointError(
                    f"{self._storage_name} has no trial {self._number} of {self._study_name!r}: "
                    "go on with the job by itself, without sweep.trial"
                ) from error
            attributes = self._storage.get_study_user_attrs(study_id)
            self._study = optuna.load_study(
                study_name=self._study_name,
                storage=self._storage,
                sampler=optuna.samplers.RandomSampler(seed=0),  # it asks for nothing
                pruner=build_pruner(**attributes.get(PRUNER, _NO_PRUNER)),
            )
            if not (metrics := self._study.metric_names):
                raise CheckpointError(
                    f"the study {self._study_name!r} does not say which metric is its value: "
                    "study.set_metric_names(['val/accuracy'])"
                )
            self._metric = metrics[0]

    def _trial(self) -> Any:
        return self._storage.get_trial(self._trial_id)
