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
    Swept,
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
_GOES_ON = ("preempted", "killed")  # states of jobs whose trial stays open
_OVERRIDES = "overrides"  # a study's attribute: those that every job has
Space = Mapping[Dimension, Any]  # what is searched: each dimension as Optuna names it
_CODE = "code"  # a failed trial's attribute: the exit code of its job


def search(arguments: Arguments) -> int:
    """Run the jobs of a study, and return the first failed one's exit code.

    The study is a function of the seed and of the results of the jobs. A resumed study keeps its
    jobs, and interrupted ones run first. It learns nothing from a job that fails.
    """
    fixed, _ = split_search(arguments)
    (config,) = composed(arguments, [fixed])
    settings = parse(config).sweep or SweepConfig()
    if config["dry_run"]:
        hint = "leave -m and sweep=optuna out for the plan of one job"
        raise ConfigError("dry_run", "a search has no plan of its jobs", hint)
    if settings.storage is not None:  # what a stranger's study holds is unpickled
        refuse_untyped("sweep", {"storage": settings.storage}, arguments.overrides)
    params = tuple(f"{key}={values}" for key, values in settings.params.items())
    single, _ = split_search(replace(arguments, overrides=params))
    raise_problems(
        Problem("sweep.params", f"{one.text}: gives one value only", "use key=value outside of it")
        for one in single
    )
    # A file's `sweep.params` come before what is typed; typed ones stand where they were typed.
    texts, place = list(arguments.overrides), 0
    for number, text in enumerate(texts, 1):
        if text.lstrip("+").startswith(("sweep.params", "sweep={")):
            place = number
    texts[place:place] = params
    fixed, found = split_search(replace(arguments, overrides=tuple(texts)))
    if not found:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError("sweep.params", message)
    typed = {key_of(text) for text in arguments.overrides}
    dimensions, more = list[Dimension](), list[Dimension]()
    for dimension in found:
        kind = dimensions if dimension.name in typed else more
        kind.append(dimension)
    dimensions += more
    refuse_outside(d.name for d in dimensions)
    space = {d: distribution(d, config) for d in dimensions}
    jobs = [[*fixed, *values] for values in samples(space)]
    composed(arguments, jobs)
    sampler = sampler_of(settings, config["seed"], space)
    entries = enqueued(space, settings.enqueue, whole=settings.sampler == "grid")
    it = Sweep(arguments, config, [d.name for d in space], settings.n_trials)
    it.metric, it.modes, it.devices = check_built(arguments, jobs)
    it.decided = it.metric is not None
    with it.held():
        trials = Trials(it, space, fixed, sampler, entries)
        it.write()
        it.settings.jobs = it.settings.jobs or 1  # on a cluster, too: the study learns from each
        it.run(trials.ask, trials.tell)
        return it.close()


def distribution(d: Dimension, config: Values) -> Any:
    """Return a dimension as Optuna names it.

    Ends that are written as integers give integers, unless the configuration holds another value.
    """
    kinds = import_optuna().distributions
    if d.choices:
        return kinds.CategoricalDistribution(d.choices)
    whole = d.integers and type(dict(walk(config)).get(d.name, 0)) is int
    kind, number = (kinds.IntDistribution, int) if whole else (kinds.FloatDistribution, float)
    step = {} if d.step is None else {"step": number(d.step)}
    return kind(number(d.low), number(d.high), log=d.log, **step)


def values_of(name: str, kind: Any) -> list[Any]:
    """Return all values of a dimension. Raises ConfigError for an interval without a step."""
    if hasattr(kind, "choices"):
        return list(kind.choices)
    if kind.step is None:
        raise ConfigError(name, "sampler=grid takes choices, or numbers with a step", "sampler=tpe")
    steps = round((kind.high - kind.low) / kind.step)
    return [kind.low + n * kind.step for n in range(steps + 1)]


def samples(space: Space) -> list[tuple[Swept, ...]]:
    """Return values for a check before the search: each choice, and the ends of each range."""
    lists = [
        getattr(kind, "choices", None) or [*dict.fromkeys([kind.low, kind.high])]
        for kind in space.values()
    ]
    longest = max(map(len, lists))
    rows = ([values[n % len(values)] for values in lists] for n in range(longest))
    return [tuple(map(swept, space, row)) for row in rows]


def swept(dimension: Dimension, value: Any) -> Swept:
    """Return the override that gives a dimension a value."""
    return Swept(f"{dimension.key}={value}", dimension.name, str(value), True)


def enqueued(space: Space, enqueue: Sequence[Values], whole: bool) -> list[Values]:
    """Return `sweep.enqueue` as values of the dimensions; `whole`: each gives all keys.

    Raises ConfigError.
    """
    kinds = {d.name: kind for d, kind in space.items()}
    words, create_trial = {d.name for d in space if d.choices}, import_optuna().trial.create_trial
    problems, entries = [], []
    for number, entry in enumerate(enqueue):
        place = f"sweep.enqueue.{number}"
        for key in sorted(entry.keys() - kinds.keys()):
            hint = did_you_mean(key, list(kinds))
            problems.append(Problem(f"{place}.{key}", "does not vary in this search", hint))
        values = {k: str(v) if k in words else v for k, v in entry.items() if k in kinds}
        asked = kinds if whole else {key: kinds[key] for key in values}
        try:  # Optuna itself would look at them in the middle of the search
            create_trial(value=0.0, params=values, distributions=asked)
        except ValueError as error:
            problems.append(Problem(place, str(error)))
        entries.append(values)
    raise_problems(problems)
    return entries


def sampler_of(settings: SweepConfig, seed: int, space: Space) -> Callable[[int], Any]:
    """Return the sampler of each trial, keyed by the seed and the trial's number.

    The next values then depend on the seed and on the study alone: not on how often the search was
    interrupted, nor on which process asks. Raises ConfigError.
    """
    optuna = import_optuna()
    name, options = settings.sampler, dict(settings.sampler_options)
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        message = "sampler=cmaes takes the package cmaes: pip install cmaes"
        raise ConfigError("sweep.sampler", message)
    fixed = dict[str, Any]()
    if name == "grid":
        fixed["search_space"] = {d.name: values_of(d.name, kind) for d, kind in space.items()}
    elif name in ("cmaes", "qmc"):
        fixed["warn_independent_sampling"] = False  # words are sampled alone
    if name == "qmc":
        options.setdefault("scramble", True)  # else the seed would change nothing

    def make(number: int) -> Any:
        # A grid's order and a sequence's scrambling belong to the whole search.
        key = seed if name in ("grid", "qmc") else zlib.crc32(f"{seed} {number}".encode())
        kind = getattr(optuna.samplers, f"{_SAMPLERS[name]}Sampler")
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


class Trials:
    """The jobs that a study suggests: `ask` for the next one, `tell` its result.

    Several may be asked for before the first is told. `base`: the overrides of all jobs; `entries`:
    values to begin with. The study is opened, or created; raises as `open_storage`, and ConfigError
    or CheckpointError for one that began with another metric or other values.
    """

    def __init__(
        self,
        it: Sweep,
        space: Space,
        base: Sequence[Swept],
        sampler: Callable[[int], Any],
        entries: Sequence[Values],
    ) -> None:
        self.it, self._space, self._base, self._sampler = it, space, base, sampler
        self._optuna = import_optuna()
        if it.settings.storage is None:
            cut_torn_line(it.folder / JOURNAL)
        self._place = as_url(it.settings.storage or str(it.folder / JOURNAL))
        self._study = self._opened()
        self._refuse_changes()
        print(f"study {self._study.study_name}: optuna-dashboard {self._place}", flush=True)
        self._open = list[Any]()  # trials whose jobs were interrupted in an earlier start
        self._waiting = dict[int, list[Any]]()  # trials, by number of the job that they wait for
        self._total = it.settings.n_trials
        self._told = False  # why the search ends early
        if it.settings.sampler == "grid":
            size = math.prod(len(values_of(d.name, kind)) for d, kind in space.items())
            self._total = min(self._total, size + len(it.settings.enqueue))
        with study_errors(self._place):
            for entry in entries:  # each once
                self._study.enqueue_trial(entry, skip_if_exists=True)
            started = self._started()
        for trial in started:  # of earlier starts; a shared study has jobs of others, too
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
        if (reason := self.it.fails_alike()) is not None:
            if not self._told:
                print(one_line(f"the search ends: {reason}"), flush=True)
            self._told = True
            return None
        with study_errors(self._place):
            while (trial := self._next()) is not None:
                overrides, config = self._overrides(trial.params), Values()
                with suppress(ConfigError):  # not checked before the search: the job reports it
                    (config,) = composed(self.it.arguments, [overrides])
                job = self.it.plan(overrides, config)
                if self.it.settings.pruner is not None:  # the job reports to its trial
                    about = f"{quoted(self._place)}, study: {quoted(self._study.study_name)}"
                    job.more = [f"sweep.trial={{storage: {about}, number: {trial.number}}}"]
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
        states, ranking = self._optuna.trial.TrialState, self.it.ranking
        value = None if job.failed else ranking.value(job)
        with study_errors(self._place):
            for trial in self._waiting.pop(job.number, []):
                if job.state in _GOES_ON:
                    continue
                if job.state == "pruned":
                    self._study.tell(trial, state=states.PRUNED)
                elif value is not None and not math.isnan(value):
                    self._study.tell(trial, value)
                else:
                    if not job.failed:
                        told = job.number, job.reason or f"it logged no {ranking.name}"
                        logger.warning("warning: job %d: %s", *told)
                    trial.set_user_attr(_CODE, job.code or 1)
                    self._study.tell(trial, state=states.FAIL)

    def _opened(self) -> Any:
        # The jobs, which ask the pruner, take it from the study.
        optuna, ranking, settings = self._optuna, self.it.ranking, self.it.settings
        storage = open_storage(self._place)
        with study_errors(self._place, opening=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(
                study_name=self.it.config["name"],
                storage=storage,
                direction="maximize" if ranking.larger_is_better else "minimize",
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
                f"the study {study.study_name!r} in {self._place} is about {metrics[0]}, and this "
                f"search about {ranking.name}: take another run_dir or sweep.storage"
            )
        return study

    def _refuse_changes(self) -> None:
        # One study has one experiment's results.
        trials = self._study.get_trials(deepcopy=False)
        began = {name: d for trial in trials for name, d in trial.distributions.items()}
        problems = []
        for d, new in self._space.items():
            old = began.get(d.name)
            try:
                self._optuna.distributions.check_distribution_compatibility(old or new, new)
            except ValueError:
                message = f"the study began with other values: {old}"
                problems.append(Problem(d.name, message, "search those, or begin another sweep"))
        raise_problems(problems)
        now = list(identity(override.text for override in self._base))
        before = self._study.user_attrs.get(_OVERRIDES)
        if before is None:
            self._study.set_user_attr(_OVERRIDES, now)
            return
        texts = sorted({*before} ^ {*now})
        changed = [text for text in texts if not trains_the_same(key_of(text))]
        if changed and self.it.config["resume_policy"] != "override":
            raise CheckpointError(
                f"the study {self._study.study_name!r} began with other values (only one of "
                f"both has {', '.join(changed)}): give the former ones, take another run_dir or "
                "sweep.storage, or mix the results of both: resume_policy=override"
            )

    def _started(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [t for t in trials if t.state.name != "WAITING"]  # as `sweep.enqueue` suggests them

    def _next(self) -> Any:
        if self._open:
            return self._optuna.trial.Trial(self._study, self._open.pop(0)._trial_id)
        trials, started = self._study.get_trials(deepcopy=False), self._started()
        if len(started) >= self._total:
            return None
        numbers = {t.number for t in trials} - {t.number for t in started}
        self._study.sampler = self._sampler(min(numbers, default=len(trials)))
        trial = self._study.ask({d.name: kind for d, kind in self._space.items()})
        # What is told goes to no sampler: that of a grid would stop a loop of Optuna's own.
        self._study.sampler = self._optuna.samplers.RandomSampler(seed=0)
        return trial

    def _overrides(self, values: Mapping[str, Any]) -> list[Swept]:
        varied = (swept(d, values[d.name]) for d in self._space if d.name in values)
        return [*self._base, *varied]

    def _count(self) -> None:
        left = self._total - len(self._started()) + len(self._open)
        self.it.count = len(self.it.jobs) + max(0, left)
