"""The jobs of a search: the study suggests each one and is told its result."""

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from callbacks.support.study import study_errors
from conf.errors import ConfigError
from scripts.cli.console import logger
from scripts.cli.request import quoted
from scripts.composition.harmless import trains_the_same
from scripts.composition.identity import identity
from scripts.composition.overrides import Swept
from scripts.sweeps.check import checked
from scripts.sweeps.process import NOT_STARTED, Outcome, note_outcome
from scripts.sweeps.space import Space, swept
from scripts.sweeps.study import started, suggested
from scripts.sweeps.sweep import Job, Sweep
from trainer.errors import CheckpointError

_GOES_ON = ("preempted", "killed")  # states of jobs whose trial stays open
_OVERRIDES = "overrides"  # a study's attribute: those that every job has
_SWEEP, _JOB = "sweep", "job"  # a trial's attributes: the folder, and the number of the job in it


class Trials:
    """The jobs that a study suggests: `ask` for the next one, `tell` its result.

    Several may be asked for before the first is told.
    """

    def __init__(
        self, it: Sweep, space: Space, study: optuna.Study, base: Sequence[Swept], place: str
    ) -> None:
        self.it = it
        self._space = space
        self._study = study
        self._base = base
        self._place = place
        self._open: list[FrozenTrial] = []  # trials whose jobs were interrupted in an earlier start
        self._waiting: dict[int, list[optuna.Trial]] = {}  # by number of the job that they wait for
        self._total = it.settings.n_trials
        if it.settings.sampler == "grid":
            self._total = min(self._total, space.size() + len(it.settings.enqueue))
        self._recall()

    def _recall(self) -> None:
        """Read the jobs of earlier starts from the study and from their folders."""
        self._refuse_changes()
        for trial in started(self._study):
            if not self._is_ours(trial):
                continue
            if not trial.state.is_finished():
                self._open.append(trial)
            elif _JOB in trial.user_attrs:
                self._read(trial)
        self._count()

    def ask(self) -> tuple[Outcome, Job] | None:
        """Return the next job to run; None if there is none to start.

        A combination that was suggested before has a result already, or shares that of the running
        job.
        """
        with study_errors(self._place):
            while (trial := self._next()) is not None:
                outcome, job = self._planned(trial)
                waiting = self._waiting.setdefault(outcome.number, [])
                waiting.append(trial)
                self._count()
                if len(waiting) > 1:
                    continue
                if outcome.state == NOT_STARTED:
                    outcome.more = self._about(trial.number)
                    return outcome, job
                self.tell(outcome)
        return None

    def tell(self, outcome: Outcome) -> None:
        """Tell the study how a job has ended.

        The trial of a job that was interrupted stays open: it goes on with the next start.
        """
        with study_errors(self._place):
            for trial in self._waiting.pop(outcome.number, []):
                if outcome.state not in _GOES_ON:
                    self._tell(trial, outcome)

    def _tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        value = None if outcome.failed else self.it.ranking.value(outcome)
        if outcome.state == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        elif value is not None and value == value:
            self._study.tell(trial, value)
        else:
            reason = outcome.reason or f"it logged no {self.it.ranking.name}"
            if not outcome.failed:
                logger.warning("warning: job %d: %s", outcome.number, reason)
            trial.set_user_attr("code", outcome.code)
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, state=TrialState.FAIL)

    def _next(self) -> optuna.Trial | None:
        if self._open:
            return Trial(self._study, self._open.pop(0)._trial_id)
        return self._study.ask() if len(started(self._study)) < self._total else None

    def _planned(self, trial: optuna.Trial) -> tuple[Outcome, Job]:
        """Give a trial its values, and their job its folder."""
        values: dict[str, object] = {}
        for dimension in self._space.dimensions:
            if self._space.active(dimension, values):
                values[dimension.name] = suggested(trial, dimension)
        job = self._job(values)
        try:
            (config,) = checked(self.it.arguments, [job])
        except ConfigError:
            config = {}  # not checked before the search: the job reports the mistake
        outcome = self.it.plan(job, config, trial.user_attrs.get(_JOB))
        trial.set_user_attr(_SWEEP, str(self.it.folder.resolve()))
        trial.set_user_attr(_JOB, outcome.number)
        return outcome, job

    def _job(self, values: dict[str, object]) -> Job:
        keys = {d.name: d.key for d in self._space.dimensions}
        return [*self._base, *(swept(keys.get(k, k), value) for k, value in values.items())]

    def _about(self, number: int) -> list[str]:
        """Return the overrides with which a job reports to its trial, if jobs may be pruned."""
        if self.it.settings.pruner is None:
            return []
        values = f"storage: {quoted(self._place)}, study: {quoted(self._study.study_name)}"
        return [f"sweep.trial={{{values}, number: {number}}}"]

    def _is_ours(self, trial: FrozenTrial) -> bool:
        """Return whether the job of a trial is of this sweep: the study may have others'."""
        own = self.it.settings.storage is None
        return own or trial.user_attrs.get(_SWEEP) == str(self.it.folder.resolve())

    def _read(self, trial: FrozenTrial) -> None:
        """Record how the job of a completed trial has ended."""
        outcome = self.it.plan(self._job(trial.params), {}, trial.user_attrs[_JOB])
        if "reason" in trial.user_attrs:
            outcome.state, outcome.code = "failed", trial.user_attrs["code"]
            outcome.reason = trial.user_attrs["reason"]
        else:
            note_outcome(outcome, 0)

    def _count(self) -> None:
        left = self._total - len(started(self._study)) + len(self._open)
        self.it.count = len(self.it.planned) + max(0, left)

    def _refuse_changes(self) -> None:
        """Raise CheckpointError for other fixed values: one study has one experiment's results."""
        now = list(identity(override.text for override in self._base))
        before = self._study.user_attrs.get(_OVERRIDES)
        if before is None:
            self._study.set_user_attr(_OVERRIDES, now)
            return
        old, new = _by_key(before), _by_key(now)
        changed = [
            f"{key}: {old.get(key, 'not given')} -> {new.get(key, 'not given')}"
            for key in {**old, **new}
            if old.get(key) != new.get(key) and not trains_the_same(key)
        ]
        if changed and self.it.config["resume_policy"] != "override":
            raise CheckpointError(
                f"the study {self._study.study_name!r} began with other values: "
                f"{', '.join(changed)}: give the former ones, take another run_dir or "
                "sweep.storage, or mix the results of both: resume_policy=override"
            )


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    parts = (text.lstrip("+~").partition("=") for text in overrides)
    return {key: value for key, _, value in parts}
