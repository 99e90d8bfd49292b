"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

import importlib.util
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from regimen.callbacks.trial import (
    PRUNER,
    as_url,
    build_pruner,
    construct,
    import_optuna,
    is_journal,
    open_storage,
    study_errors,
)
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError, Problem, did_you_mean, one_line, raise_problems
from regimen.conf.interpolation import walk
from regimen.conf.schema import SweepConfig, Values
from regimen.scripts.cli.arguments import Arguments, key_of, quoted
from regimen.scripts.cli.console import logger
from regimen.scripts.composition.compose import split_search
from regimen.scripts.composition.overrides import (
    Dimension,
    SweepOverride,
    identity,
    refuse_outside,
    refuse_untyped,
    trains_the_same,
)
from regimen.scripts.sweeps.grid import check_built, composed
from regimen.scripts.sweeps.leaderboard import NOT_STARTED, Job
from regimen.scripts.sweeps.sweep import Sweep
from regimen.trainer.errors import CheckpointError

JOURNAL = "study.journal"  # in the sweep's folder
_SAMPLERS = {"tpe": "TPE", "random": "Random", "cmaes": "CmaEs", "grid": "Grid", "qmc": "QMC"}
_OPEN_STATES = ("preempted", "killed")  # states of jobs whose trial stays open
_OVERRIDES = "overrides"  # a study's attribute: the overrides that every job has
_CODE = "code"  # a failed trial's attribute: the exit code of its job
Space = Mapping[Dimension, Any]  # what is searched: each dimension and its Optuna distribution


def search(arguments: Arguments) -> int:
    """Run the jobs of a study, and return the first failed one's exit code.

    The study is a function of the seed and of the results of the jobs. A resumed study keeps its
    jobs, and interrupted ones run first. It learns nothing from a job that fails.
    """
    single, _ = split_search(arguments)
    (config,) = composed(arguments, [single])  # its `sweep.params` say what else is searched
    settings = parse(config).sweep or SweepConfig()
    if config["dry_run"]:
        raise ConfigError(
            "dry_run",
            "a search has no plan of its jobs",
            "leave -m and sweep=optuna out for the plan of one job",
        )
    if settings.storage is not None:  # Optuna unpickles what a study holds
        refuse_untyped("sweep", {"storage": settings.storage}, arguments.overrides)
    fixed, dimensions = _dimensions(arguments, settings)
    refuse_outside(dimension.name for dimension in dimensions)
    space = {dimension: distribution(dimension, config) for dimension in dimensions}
    jobs = [[*fixed, *values] for values in samples(space)]
    composed(arguments, jobs)  # finds values that the schema refuses, before the first job
    make_sampler = sampler_of(settings, config["seed"], space)
    queued = enqueued(space, settings.enqueue, whole=settings.sampler == "grid")
    varied = [dimension.name for dimension in space]
    runner = Sweep(arguments, config, varied, settings.n_trials)
    runner.metric, runner.modes, runner.devices = check_built(arguments, jobs)
    runner.decided = runner.metric is not None
    with runner.lock():
        trials = Trials(runner, space, fixed, make_sampler, queued)
        runner.write()
        # One at a time by default, on a cluster too: the study learns from each.
        runner.settings.jobs = runner.settings.jobs or 1
        runner.run(trials.ask, trials.tell)
        return runner.close()


def _dimensions(
    arguments: Arguments, settings: SweepConfig
) -> tuple[list[SweepOverride], list[Dimension]]:
    """Return the overrides that all jobs have, and what is searched: typed keys, then a file's.

    Raises ConfigError.
    """
    params = tuple(f"{key}={values}" for key, values in settings.params.items())
    _refuse_single_values(replace(arguments, overrides=params))
    # A file's `sweep.params` come before what is typed; typed ones stand where they were typed.
    texts = list(arguments.overrides)
    position = 0
    for number, text in enumerate(texts, 1):
        if text.lstrip("+").startswith(("sweep.params", "sweep={")):
            position = number
    texts[position:position] = params
    fixed, dimensions = split_search(replace(arguments, overrides=tuple(texts)))
    if not dimensions:
        raise ConfigError(
            "sweep.params", "nothing to search: give a key as interval(a,b) or choice(a,b)"
        )
    typed_keys = {key_of(text) for text in arguments.overrides}
    dimensions.sort(key=lambda dimension: dimension.name not in typed_keys)
    return fixed, dimensions


def _refuse_single_values(params: Arguments) -> None:
    """Raise ConfigError for entries of `sweep.params` that give one value only."""
    single, _ = split_search(params)
    problems = []
    for override in single:
        problems.append(
            Problem(
                "sweep.params",
                f"{override.text}: gives one value only",
                "use key=value outside of it",
            )
        )
    raise_problems(problems)


def distribution(dimension: Dimension, config: Values) -> Any:
    """Return the Optuna distribution of a dimension.

    Ends that are written as integers give integers, unless the configuration holds another value.
    """
    distributions = import_optuna().distributions
    if dimension.choices:
        return distributions.CategoricalDistribution(dimension.choices)
    number: type[int] | type[float] = float
    make = distributions.FloatDistribution
    configured = dict(walk(config)).get(dimension.name, 0)
    if dimension.integers and type(configured) is int:
        number = int
        make = distributions.IntDistribution
    options: dict[str, Any] = {"log": dimension.log}
    if dimension.step is not None:
        options["step"] = number(dimension.step)
    return make(number(dimension.low), number(dimension.high), **options)


def samples(space: Space) -> list[tuple[SweepOverride, ...]]:
    """Return values to check before the search: each choice, and the ends of each range.

    A job takes one value of each dimension; the shorter lists are repeated.
    """
    lists = []
    for kind in space.values():
        if hasattr(kind, "choices"):
            lists.append(list(kind.choices))
        else:
            lists.append(list(dict.fromkeys([kind.low, kind.high])))
    rows = []
    for number in range(max(map(len, lists))):
        row = []
        for dimension, values in zip(space, lists, strict=True):
            row.append(_override(dimension, values[number % len(values)]))
        rows.append(tuple(row))
    return rows


def _override(dimension: Dimension, value: Any) -> SweepOverride:
    """Return the override that gives a dimension a value."""
    return SweepOverride(f"{dimension.key}={value}", dimension.name, str(value), True)


def enqueued(space: Space, enqueue: Sequence[Values], whole: bool) -> list[Values]:
    """Return `sweep.enqueue` as values of the dimensions; `whole`: each must give all keys.

    Raises ConfigError.
    """
    distributions = _by_name(space)
    text_keys = [dimension.name for dimension in space if dimension.choices]
    problems = []
    entries = []
    for number, entry in enumerate(enqueue):
        place = f"sweep.enqueue.{number}"
        for key in sorted(entry.keys() - distributions.keys()):
            hint = did_you_mean(key, list(distributions))
            problems.append(Problem(f"{place}.{key}", "does not vary in this search", hint))
        values = {}
        for key, value in entry.items():
            if key in distributions:
                values[key] = str(value) if key in text_keys else value
        needed = distributions
        if not whole:
            needed = {key: distributions[key] for key in values}
        try:  # Optuna itself would check them in the middle of the search
            import_optuna().trial.create_trial(value=0.0, params=values, distributions=needed)
        except ValueError as error:
            problems.append(Problem(place, str(error)))
        entries.append(values)
    raise_problems(problems)
    return entries


def sampler_of(settings: SweepConfig, seed: int, space: Space) -> Callable[[int], Any]:
    """Return the sampler of each trial, keyed by the seed and the trial's number.

    So the next values depend on the seed and on the study alone: not on how often the search was
    interrupted, nor on which process asks. Raises ConfigError.
    """
    optuna = import_optuna()
    name = settings.sampler
    options = dict(settings.sampler_options)
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise ConfigError(
            "sweep.sampler", "sampler=cmaes takes the package cmaes: pip install cmaes"
        )
    fixed = dict[str, Any]()
    if name == "grid":
        fixed["search_space"] = _grid_of(space)
    elif name in ("cmaes", "qmc"):
        fixed["warn_independent_sampling"] = False  # words are sampled alone
    if name == "qmc":
        options.setdefault("scramble", True)  # else the seed would change nothing
    sampler_class = getattr(optuna.samplers, f"{_SAMPLERS[name]}Sampler")

    def make(number: int) -> Any:
        sampler_seed = seed
        # A grid's order and a sequence's scrambling belong to the whole search.
        if name not in ("grid", "qmc"):
            sampler_seed = zlib.crc32(f"{seed} {number}".encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return construct(
                sampler_class, options, "sweep.sampler_options", seed=sampler_seed, **fixed
            )

    make(0)  # raises ConfigError now, not in the middle of the search
    build_pruner(settings.pruner, settings.pruner_options)
    return make


def _grid_of(space: Space) -> dict[str, list[Any]]:
    """Return all values of each dimension, by name. Raises ConfigError."""
    return {name: values_of(name, kind) for name, kind in _by_name(space).items()}


def values_of(name: str, distribution: Any) -> list[Any]:
    """Return all values of a dimension. Raises ConfigError for an interval without a step."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    low = distribution.low
    step = distribution.step
    if step is None:
        raise ConfigError(name, "sampler=grid takes choices, or numbers with a step", "sampler=tpe")
    count = round((distribution.high - low) / step) + 1
    return [low + n * step for n in range(count)]


def _by_name(space: Space) -> dict[str, Any]:
    """Return the distributions by the names of their dimensions."""
    return {dimension.name: kind for dimension, kind in space.items()}


class Trials:
    """The jobs that a study suggests: `ask` for the next one, `tell` its result.

    Several may be asked for before the first is told. `base`: the overrides of all jobs;
    `make_sampler`: as `sampler_of` returns it; `queued`: values to begin with. The study is opened,
    or created; raises as `open_storage`, and ConfigError or CheckpointError for one that began with
    another metric or other values.
    """

    def __init__(
        self,
        runner: Sweep,
        space: Space,
        base: Sequence[SweepOverride],
        make_sampler: Callable[[int], Any],
        queued: Sequence[Values],
    ) -> None:
        self.runner = runner
        self._space = space
        self._base = base
        self._make_sampler = make_sampler
        self._optuna = import_optuna()
        self._interrupted = list[Any]()  # trials whose jobs an earlier start did not finish
        self._asked = dict[int, list[Any]]()  # trials that are not told yet, by number of their job
        self._gave_up = False
        settings = runner.settings
        self._total = settings.n_trials
        if settings.sampler == "grid":
            size = math.prod(map(len, _grid_of(space).values()))
            self._total = min(self._total, size + len(settings.enqueue))
        if settings.storage is None:
            cut_torn_line(runner.folder / JOURNAL)
        self._url = as_url(settings.storage or str(runner.folder / JOURNAL))
        self._study = self._open_study()
        self._refuse_other_values()
        self._refuse_other_overrides()
        print(f"study {self._study.study_name}: optuna-dashboard {self._url}", flush=True)
        with study_errors(self._url):
            for values in queued:  # each once
                self._study.enqueue_trial(values, skip_if_exists=True)
            started = self._started()
        for trial in started:
            self._take_over(trial)
        self._update_count()

    def _open_study(self) -> Any:
        optuna = self._optuna
        ranking = self.runner.ranking
        settings = self.runner.settings
        storage = open_storage(self._url)
        with study_errors(self._url, opening=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(
                study_name=self.runner.config["name"],
                storage=storage,
                direction="maximize" if ranking.larger_is_better else "minimize",
                pruner=build_pruner(settings.pruner, settings.pruner_options),
                load_if_exists=True,
            )
            metrics = study.metric_names
            if not metrics:
                metrics = [ranking.name]
                study.set_metric_names(metrics)
            # The jobs build their pruner from the study.
            options = dict(settings.pruner_options)
            study.set_user_attr(PRUNER, {"name": settings.pruner, "options": options})
        if metrics != [ranking.name]:
            raise CheckpointError(
                f"the study {study.study_name!r} in {self._url} is about {metrics[0]}, and this "
                f"search about {ranking.name}: take another run_dir or sweep.storage"
            )
        return study

    def _refuse_other_values(self) -> None:
        """Raise ConfigError if the study has searched other values of a dimension."""
        former = dict[str, Any]()
        for trial in self._study.get_trials(deepcopy=False):
            former |= trial.distributions
        problems = []
        for name, new in _by_name(self._space).items():
            old = former.get(name, new)
            try:
                self._optuna.distributions.check_distribution_compatibility(old, new)
            except ValueError:
                problems.append(
                    Problem(
                        name,
                        f"the study began with other values: {old}",
                        "search those, or begin another sweep",
                    )
                )
        raise_problems(problems)

    def _refuse_other_overrides(self) -> None:
        """Raise CheckpointError if the jobs of the study have other overrides in common."""
        now = list(identity(override.text for override in self._base))
        before = self._study.user_attrs.get(_OVERRIDES)
        if before is None:
            self._study.set_user_attr(_OVERRIDES, now)
            return
        changed = []
        for text in sorted({*before} ^ {*now}):  # what only one of both has
            if not trains_the_same(key_of(text)):
                changed.append(text)
        if changed and self.runner.config["resume_policy"] != "override":
            raise CheckpointError(
                f"the study {self._study.study_name!r} began with other values (only one of "
                f"both has {', '.join(changed)}): give the former ones, take another run_dir or "
                "sweep.storage, or mix the results of both: resume_policy=override"
            )

    def _take_over(self, trial: Any) -> None:
        """Plan the job of a trial that an earlier start has asked for."""
        overrides = self._overrides(trial.params)
        is_shared = self.runner.settings.storage is not None
        if is_shared and not self.runner.folder_of(overrides):
            return  # a job of another search
        if trial.state.is_finished():
            job = self.runner.plan(overrides, {})
            job.end(trial.user_attrs.get(_CODE, 0))
        else:
            self._interrupted.append(trial)

    def ask(self) -> Job | None:
        """Return the next job to run; None if there is none to start.

        A combination that was suggested before already has a result, or shares that of the running
        job.
        """
        failure = self.runner.common_failure()
        if failure is not None:
            if not self._gave_up:
                print(one_line(f"the search ends: {failure}"), flush=True)
            self._gave_up = True
            return None
        with study_errors(self._url):
            while (trial := self._next()) is not None:
                job = self._plan(trial)
                trials = self._asked.setdefault(job.number, [])
                trials.append(trial)
                self._update_count()
                if len(trials) > 1:
                    continue
                if job.state == NOT_STARTED:
                    return job
                self.tell(job)
        return None

    def _next(self) -> Any:
        """Return the next trial: an interrupted one, or a new one; None after the last."""
        study = self._study
        if self._interrupted:
            interrupted = self._interrupted.pop(0)
            return self._optuna.trial.Trial(study, interrupted._trial_id)
        trials = study.get_trials(deepcopy=False)
        waiting = [trial.number for trial in trials if trial.state.name == "WAITING"]
        if len(trials) - len(waiting) >= self._total:
            return None
        # `ask` takes the first trial that waits; without one, it makes a new trial.
        study.sampler = self._make_sampler(min(waiting, default=len(trials)))
        trial = study.ask(_by_name(self._space))
        # Swapped before `tell`: the sampler of a grid calls `study.stop()` there, which fails
        # outside of Optuna's own loop.
        study.sampler = self._optuna.samplers.RandomSampler(seed=0)
        return trial

    def _plan(self, trial: Any) -> Job:
        """Return the job of a trial."""
        overrides = self._overrides(trial.params)
        config = Values()
        with suppress(ConfigError):  # values that were not checked before: the job reports it
            (config,) = composed(self.runner.arguments, [overrides])
        job = self.runner.plan(overrides, config)
        if self.runner.settings.pruner is not None:  # the job reports to its trial
            study = f"{quoted(self._url)}, study: {quoted(self._study.study_name)}"
            job.more_texts = [f"sweep.trial={{storage: {study}, number: {trial.number}}}"]
        return job

    def tell(self, job: Job) -> None:
        """Tell the study how a job has ended.

        The trial of a job that was interrupted stays open: it goes on with the next start.
        """
        trials = self._asked.pop(job.number, [])
        if job.state in _OPEN_STATES:
            return
        with study_errors(self._url):
            for trial in trials:
                self._tell(trial, job)

    def _tell(self, trial: Any, job: Job) -> None:
        states = self._optuna.trial.TrialState
        if job.state == "pruned":
            self._study.tell(trial, state=states.PRUNED)
            return
        ranking = self.runner.ranking
        value = ranking.value(job)
        if not job.failed and value is not None and not math.isnan(value):
            self._study.tell(trial, value)
            return
        if not job.failed:
            reason = job.reason or f"it logged no {ranking.name}"
            logger.warning("warning: job %d: %s", job.number, reason)
        trial.set_user_attr(_CODE, job.code or 1)
        self._study.tell(trial, state=states.FAIL)

    def _started(self) -> list[Any]:
        """Return the trials that are not waiting, as those of `sweep.enqueue` are."""
        return [t for t in self._study.get_trials(deepcopy=False) if t.state.name != "WAITING"]

    def _overrides(self, values: Mapping[str, Any]) -> list[SweepOverride]:
        overrides = [*self._base]
        for dimension in self._space:
            if dimension.name in values:
                overrides.append(_override(dimension, values[dimension.name]))
        return overrides

    def _update_count(self) -> None:
        """Set the number of jobs: those that are planned, and the trials that are left."""
        left = self._total - len(self._started()) + len(self._interrupted)
        self.runner.count = len(self.runner.jobs) + max(0, left)


def cut_torn_line(journal: Path) -> None:
    """Remove an incomplete last line, left by a full disk or a kill, before the next is added.

    The journal is the sweep's own, whose folder this process has locked.
    """
    if not journal.is_file() or journal.is_symlink():
        return
    content = journal.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content) and is_journal(content):
        with journal.open("r+b") as file:
            file.truncate(end)
