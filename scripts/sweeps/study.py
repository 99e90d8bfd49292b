"""The study that chooses the jobs of a search, by Optuna."""

import importlib.util
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from callbacks.support.study import PRUNER, build_pruner, construct, open_storage, study_errors
from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import SweepConfig
from scripts.composition.overrides import Dimension
from scripts.sweeps.space import Space
from trainer.errors import CheckpointError

_SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "grid": "GridSampler",
    "qmc": "QMCSampler",
}


class KeyedSampler(BaseSampler):
    """Draw each trial's values with a generator of its own, keyed by the seed and its number.

    The next values then depend on the seed and on the study alone: not on how often the search was
    interrupted, nor on which process asks.
    """

    def __init__(self, make: Callable[[int], BaseSampler]) -> None:
        self._make = make
        self._sampler = make(0)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Take the generator of the trial."""
        self._sampler = self._make(trial.number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return what is sampled jointly."""
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample jointly."""
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Sample one value."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    # `after_trial` stays the base's, which does nothing: the samplers above only stop there a loop
    # of Optuna's own.


def keyed_sampler(settings: SweepConfig, seed: int, space: Space) -> KeyedSampler:
    """Return the sampler that `sweep.sampler` names. Raises ConfigError."""
    name, options = settings.sampler, dict(settings.sampler_options)
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        message = "sampler=cmaes takes the package cmaes: pip install cmaes"
        raise ConfigError(Problem("sweep.sampler", message))
    kind = getattr(optuna.samplers, _SAMPLERS[name])
    fixed: dict[str, Any] = {}
    if name == "grid":
        fixed["search_space"] = space.grid()
    if name in ("cmaes", "qmc"):
        fixed["warn_independent_sampling"] = False  # conditions and words are sampled alone
    if name == "qmc":
        options.setdefault("scramble", True)  # else the seed would change nothing

    def make(number: int) -> BaseSampler:
        # A grid's order and a sequence's scrambling belong to the whole search.
        key = seed if name in ("grid", "qmc") else zlib.crc32(f"{seed} {number}".encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: BaseSampler = construct(
                kind, options, "sweep.sampler_options", seed=key, **fixed
            )
        return sampler

    return KeyedSampler(make)


class StudyPlan:
    """How a study chooses values, and which jobs it ends early. Raises ConfigError."""

    def __init__(self, settings: SweepConfig, seed: int, space: Space) -> None:
        self.sampler = keyed_sampler(settings, seed, space)
        self.pruner = build_pruner(settings.pruner, settings.pruner_options)
        self.pruner_node = {"name": settings.pruner, "options": dict(settings.pruner_options)}


def open_study(
    place: str, name: str, metric: str, larger_is_better: bool, plan: StudyPlan
) -> optuna.Study:
    """Open a study, or create it. Raises as `open_storage`, and CheckpointError.

    The pruner is written into the study: the jobs, which ask it, take it from there.
    """
    storage = open_storage(place)
    with study_errors(place, opening=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="maximize" if larger_is_better else "minimize",
            sampler=plan.sampler,
            pruner=plan.pruner,
            load_if_exists=True,
        )
        if not (metrics := study.metric_names):
            metrics = [metric]
            study.set_metric_names(metrics)
        study.set_user_attr(PRUNER, plan.pruner_node)
        if metrics != [metric]:
            raise CheckpointError(
                f"the study {name!r} in {place} is about {metrics[0]}, and this search "
                f"about {metric}: take another run_dir or sweep.storage"
            )
        return study


def check_distributions(study: optuna.Study, space: Sequence[Dimension]) -> None:
    """Raise ConfigError for values that the study, which has begun with others, cannot take."""
    problems: dict[str, Problem] = {}
    for trial in study.get_trials(deepcopy=False):
        for dimension in space:
            old = trial.distributions.get(dimension.name)
            try:
                if old is not None:
                    check_distribution_compatibility(old, distribution(dimension))
            except ValueError:
                message = f"the study began with other values: {_described(old)}"
                hint = "search those, or begin another sweep"
                problems[dimension.name] = Problem(dimension.name, message, hint)
    raise_problems(problems.values())


def _described(found: BaseDistribution | None) -> str:
    if isinstance(found, CategoricalDistribution):
        return ", ".join(map(str, found.choices))
    assert isinstance(found, IntDistribution | FloatDistribution)
    kind = "integers" if isinstance(found, IntDistribution) else "numbers"
    return f"{kind} from {found.low} to {found.high}"


def distribution(dimension: Dimension) -> BaseDistribution:
    """Return a dimension as Optuna names it."""
    low, high, log = dimension.low, dimension.high, dimension.log
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.integers:
        return IntDistribution(int(low), int(high), log=log, step=int(dimension.step or 1))
    return FloatDistribution(low, high, log=log, step=dimension.step)


def suggested(trial: optuna.Trial, dimension: Dimension) -> Any:
    """Return the value that the study chooses."""
    name, low, high, log = dimension.name, dimension.low, dimension.high, dimension.log
    if dimension.choices:
        return trial.suggest_categorical(name, dimension.choices)
    if dimension.integers:
        step = int(dimension.step or 1)
        return trial.suggest_int(name, int(low), int(high), step=step, log=log)
    return trial.suggest_float(name, low, high, step=dimension.step, log=log)


def started(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that are no longer mere suggestions of `sweep.enqueue`."""
    return [t for t in study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]


def enqueue(study: optuna.Study, entries: Sequence[Mapping[str, Any]]) -> None:
    """Let the study begin with these values, each once."""
    for entry in entries:
        study.enqueue_trial(dict(entry), skip_if_exists=True)
