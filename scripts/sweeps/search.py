"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

import importlib.util
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from callbacks.trial import (
    PRUNER,
    as_url,
    build_pruner,
    construct,
    import_optuna,
    is_journal,
    open_storage,
    study_errors,
)
from conf.check import parse
from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import SweepConfig
from scripts.cli.arguments import Arguments, quoted
from scripts.cli.console import logger
from scripts.composition.compose import compose, split_search
from scripts.composition.identity import identity, refuse_outside, refuse_untyped, trains_the_same
from scripts.composition.overrides import Dimension, Swept
from scripts.sweeps.grid import check_built, composed
from scripts.sweeps.jobs import run_jobs
from scripts.sweeps.leaderboard import NOT_STARTED, Job
from scripts.sweeps.space import (
    distribution,
    enqueued,
    given,
    samples,
    swept,
    values_of,
    with_integers,
)
from scripts.sweeps.sweep import Sweep
from trainer.errors import CheckpointError

JOURNAL = "study.journal"  # in the sweep's folder
_SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "grid": "GridSampler",
    "qmc": "QMCSampler",
}
_GOES_ON = ("preempted", "killed")  # states of jobs whose trial stays open
_OVERRIDES = "overrides"  # a study's attribute: those that every job has
_CODE = "code"  # a failed trial's attribute: the exit code of its job


def search(arguments: Arguments) -> int:
    """Run the jobs of a study, and return the first failed one's exit code.

    The study is a function of the seed and of the results of the jobs. A resumed study keeps its
    jobs, and interrupted ones run first. It learns nothing from a job that fails.
    """
    texts, varied = split_search(arguments)
    config = compose(replace(arguments, overrides=tuple(texts), multirun=False)).config
    settings = parse(config).sweep or SweepConfig()
    if config["dry_run"]:
        hint = "leave -m and sweep=optuna out for the plan of one job"
        raise ConfigError(Problem("dry_run", "a search has no plan of its jobs", hint))
    if settings.storage is not None:  # what a stranger's study holds is unpickled
        refuse_untyped("sweep", {"storage": settings.storage}, arguments.overrides)
    varied += given(arguments, settings.params, {d.name for d in varied})
    if not varied:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError(Problem("sweep.params", message))
    space = [with_integers(dimension, config) for dimension in varied]
    refuse_outside(d.name for d in space)
    pairs = ((text, *text.lstrip("+~").partition("=")) for text in texts)
    fixed = [Swept(text, key, value, False) for text, key, _, value in pairs]
    jobs = [[*fixed, *values] for values in samples(space)]
    composed(arguments, jobs)
    import_optuna()
    sampler = sampler_of(settings, config["seed"], space)
    entries = enqueued(space, settings.enqueue, whole=settings.sampler == "grid")
    it = Sweep(arguments, config, [d.name for d in space], settings.n_trials)
    known = settings.storage or (str(it.found / JOURNAL) if it.found else None)
    if known is not None and Path(known).exists():
        open_storage(known)  # a damaged study ends the search without a trace
    it.metric, it.devices = check_built(arguments, jobs)
    it.decided = it.metric is not None
    with it.held():
        if settings.storage is None:
            cut_torn_line(it.folder / JOURNAL)
        place = as_url(settings.storage or str(it.folder / JOURNAL))
        study = open_study(it, place, settings, sampler(0))
        refuse_other_values(study, space)
        print(f"study {study.study_name}: optuna-dashboard {place}", flush=True)
        with study_errors(place):
            for entry in entries:  # each once
                study.enqueue_trial(entry, skip_if_exists=True)
            trials = Trials(it, space, study, fixed, place, sampler)
        it.write()
        it.settings.jobs = it.settings.jobs or 1  # on a cluster, too: the study learns from each
        run_jobs(it, trials.ask, trials.tell)
        return it.close()


def sampler_of(
    settings: SweepConfig, seed: int, space: Sequence[Dimension]
) -> Callable[[int], Any]:
    """Return the sampler of each trial, keyed by the seed and the trial's number.

    The next values then depend on the seed and on the study alone: not on how often the search was
    interrupted, nor on which process asks. Raises ConfigError.
    """
    optuna = import_optuna()
    name, options = settings.sampler, dict(settings.sampler_options)
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        message = "sampler=cmaes takes the package cmaes: pip install cmaes"
        raise ConfigError(Problem("sweep.sampler", message))
    kind = getattr(optuna.samplers, _SAMPLERS[name])
    fixed: dict[str, Any] = {}
    if name == "grid":
        fixed["search_space"] = {d.name: values_of(d) for d in space}
    if name in ("cmaes", "qmc"):
        fixed["warn_independent_sampling"] = False  # words are sampled alone
    if name == "qmc":
        options.setdefault("scramble", True)  # else the seed would change nothing

    def make(number: int) -> Any:
        # A grid's order and a sequence's scrambling belong to the whole search.
        key = seed if name in ("grid", "qmc") else zlib.crc32(f"{seed} {number}".encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return construct(kind, options, "sweep.sampler_options", seed=key, **fixed)

    make(0)
    build_pruner(settings.pruner, settings.pruner_options)
    return make


def cut_torn_line(journal: Path) -> None:
    """Remove an incomplete last line, left by a full disk or a kill, before the next is added.

    The journal is the sweep's own, whose folder this process has locked.
    """
    content = journal.read_bytes() if journal.is_file() and not journal.is_symlink() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content) and is_journal(content):
        with journal.open("r+b") as file:
            file.truncate(end)


def open_study(it: Sweep, place: str, settings: SweepConfig, sampler: Any) -> Any:
    """Open a study, or create it. Raises as `open_storage`, and CheckpointError.

    The pruner is written into the study: the jobs, which ask it, take it from there.
    """
    optuna, ranking, name = import_optuna(), it.ranking, it.config["name"]
    storage = open_storage(place)
    with study_errors(place, opening=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="maximize" if ranking.larger_is_better else "minimize",
            sampler=sampler,
            pruner=build_pruner(settings.pruner, settings.pruner_options),
            load_if_exists=True,
        )
        if not (metrics := study.metric_names):
            metrics = [ranking.name]
            study.set_metric_names(metrics)
        options = dict(settings.pruner_options)
        study.set_user_attr(PRUNER, {"name": settings.pruner, "options": options})
    if metrics != [ranking.name]:
        raise CheckpointError(
            f"the study {name!r} in {place} is about {metrics[0]}, and this search "
            f"about {ranking.name}: take another run_dir or sweep.storage"
        )
    return study


def refuse_other_values(study: Any, space: Sequence[Dimension]) -> None:
    """Raise ConfigError for values that the study, which has begun with others, cannot take."""
    compatible = import_optuna().distributions.check_distribution_compatibility
    trials = study.get_trials(deepcopy=False)
    began = {name: d for trial in trials for name, d in trial.distributions.items()}
    problems = []
    for dimension in space:
        old, new = began.get(dimension.name), distribution(dimension)
        try:
            compatible(old or new, new)
        except ValueError:
            values = ", ".join(getattr(old, "choices", [str(old)]))
            message = f"the study began with other values: {values}"
            problems.append(
                Problem(dimension.name, message, "search those, or begin another sweep")
            )
    raise_problems(problems)


class Trials:
    """The jobs that a study suggests: `ask` for the next one, `tell` its result.

    Several may be asked for before the first is told.
    """

    def __init__(
        self,
        it: Sweep,
        space: Sequence[Dimension],
        study: Any,
        base: Sequence[Swept],
        place: str,
        sampler: Callable[[int], Any],
    ) -> None:
        self.it, self._space, self._study, self._base = it, space, study, base
        self._place, self._sampler = place, sampler
        self._optuna = import_optuna()
        self._open: list[Any] = []  # trials whose jobs were interrupted in an earlier start
        self._waiting: dict[int, list[Any]] = {}  # trials, by number of the job that they wait for
        self._total = it.settings.n_trials
        if it.settings.sampler == "grid":
            size = math.prod(len(values_of(d)) for d in space)
            self._total = min(self._total, size + len(it.settings.enqueue))
        self._refuse_changes()
        for trial in self._started():  # of earlier starts; a shared study has jobs of others, too
            overrides = self._overrides(trial.params)
            if it.settings.storage is not None and not it.knows(overrides):
                continue
            if not trial.state.is_finished():
                self._open.append(trial)
            else:
                it.plan(overrides, {}).end(trial.user_attrs.get(_CODE, 0))
        self._count()

    def ask(self) -> Job | None:
        """Return the next job to run; None if there is none to start.

        A combination that was suggested before has a result already, or shares that of the running
        job.
        """
        with study_errors(self._place):
            while (trial := self._next()) is not None:
                job = self._planned(trial)
                waiting = self._waiting.setdefault(job.number, [])
                waiting.append(trial)
                self._count()
                if len(waiting) > 1:
                    continue
                if job.state == NOT_STARTED:
                    return job
                self.tell(job)
        return None

    def tell(self, job: Job) -> None:
        """Tell the study how a job has ended.

        The trial of a job that was interrupted stays open: it goes on with the next start.
        """
        states = self._optuna.trial.TrialState
        value = None if job.failed else self.it.ranking.value(job)
        with study_errors(self._place):
            for trial in self._waiting.pop(job.number, []):
                if job.state in _GOES_ON:
                    continue
                if job.state == "pruned":
                    self._study.tell(trial, state=states.PRUNED)
                elif value is not None and not math.isnan(value):
                    self._study.tell(trial, value)
                else:
                    reason = job.reason or f"it logged no {self.it.ranking.name}"
                    if not job.failed:
                        logger.warning("warning: job %d: %s", job.number, reason)
                    trial.set_user_attr(_CODE, job.code or 1)
                    self._study.tell(trial, state=states.FAIL)

    def _started(self) -> list[Any]:
        waits = self._optuna.trial.TrialState.WAITING  # a mere suggestion of `sweep.enqueue`
        return [t for t in self._study.get_trials(deepcopy=False) if t.state != waits]

    def _next(self) -> Any:
        if self._open:
            return self._optuna.trial.Trial(self._study, self._open.pop(0)._trial_id)
        trials, started = self._study.get_trials(deepcopy=False), self._started()
        if len(started) >= self._total:
            return None
        numbers = {t.number for t in trials} - {t.number for t in started}
        self._study.sampler = self._sampler(min(numbers, default=len(trials)))
        trial = self._study.ask({d.name: distribution(d) for d in self._space})
        # What is told goes to no sampler: that of a grid would stop a loop of Optuna's own.
        self._study.sampler = self._optuna.samplers.RandomSampler(seed=0)
        return trial

    def _planned(self, trial: Any) -> Job:
        overrides = self._overrides(trial.params)
        try:
            (config,) = composed(self.it.arguments, [overrides])
        except ConfigError:
            config = {}  # not checked before the search: the job reports the mistake
        job = self.it.plan(overrides, config)
        if self.it.settings.pruner is not None:  # the job reports to its trial
            about = f"storage: {quoted(self._place)}, study: {quoted(self._study.study_name)}"
            job.more = [f"sweep.trial={{{about}, number: {trial.number}}}"]
        return job

    def _overrides(self, values: Mapping[str, Any]) -> list[Swept]:
        varied = (swept(d, values[d.name]) for d in self._space if d.name in values)
        return [*self._base, *varied]

    def _count(self) -> None:
        left = self._total - len(self._started()) + len(self._open)
        self.it.count = len(self.it.jobs) + max(0, left)

    def _refuse_changes(self) -> None:
        # One study has one experiment's results.
        now = list(identity(override.text for override in self._base))
        before = self._study.user_attrs.get(_OVERRIDES)
        if before is None:
            self._study.set_user_attr(_OVERRIDES, now)
            return
        old, new = (
            {key: value for key, _, value in (t.lstrip("+~").partition("=") for t in texts)}
            for texts in (before, now)
        )
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
