"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import Arguments
from scripts.composition.compose import compose, split_search
from scripts.composition.identity import refuse_outside
from scripts.composition.overrides import Dimension, Swept
from scripts.sweeps.check import check_built, checked
from scripts.sweeps.jobs import run_jobs
from scripts.sweeps.process import NOT_STARTED, Outcome
from scripts.sweeps.sweep import Sweep

_MOST_SAMPLES = 100  # combinations that are checked before a search


def search(arguments: Arguments) -> int:
    """Run `sweep.n_trials` jobs, and return the first failed one's exit code.

    The search is a function of the seed and of what the jobs return: gone on with, it asks for the
    same jobs again, and those that have finished answer at once. A job that fails tells Optuna
    nothing, and the search goes on.
    """
    fixed, space = split_search(arguments)
    config = compose(replace(arguments, overrides=tuple(fixed), multirun=False)).config
    settings = config["sweep"]
    space += _given(arguments, settings["params"], {dimension.key for dimension in space})
    if not space:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError(Problem("sweep.params", message))
    refuse_outside(dimension.key for dimension in space)
    space = [with_integers(dimension, config) for dimension in space]
    base = [_fixed(text) for text in fixed]
    jobs = [[*base, *values] for values in samples(space)]
    checked(arguments, jobs)
    study = _study(settings["sampler"], config["seed"])
    varied = [dimension.key.lstrip("+") for dimension in space]
    it = Sweep(arguments, config, varied, settings["n_trials"])
    check_built(arguments, jobs, it.server)
    with it.held():
        it.write()
        for _ in range(settings["n_trials"]):
            if not it.ended:
                _run_trial(it, study, base, space)
        return it.close()


def _run_trial(it: Sweep, study: Any, base: list[Swept], space: list[Dimension]) -> None:
    """Run the job that the study asks for, unless it finished in an earlier start."""
    trial = study.ask()
    job = base + [_suggested(trial, dimension) for dimension in space]
    try:
        (config,) = checked(it.arguments, [job])
    except ConfigError:
        config = {}  # of combinations that were not sampled, the job tells
    outcome = it.plan(job, config)
    if outcome.state == NOT_STARTED:
        run_jobs(it, iter([(outcome, job), None]).__next__)
    if it.stop.number is None:
        _tell(study, trial, it, outcome)


def samples(space: Sequence[Dimension]) -> list[tuple[Swept, ...]]:
    """Return values that show every mistake in a space that a few jobs can show.

    That is all combinations of the choices if they are not too many, else each choice once; of an
    interval its lower end and its upper.
    """
    lists = [[_swept(d.key, value) for value in _values(d)] for d in space]
    if math.prod(map(len, lists)) <= _MOST_SAMPLES:
        return list(itertools.product(*lists))
    longest = max(map(len, lists))
    return [tuple(values[n % len(values)] for values in lists) for n in range(longest)]


def _values(dimension: Dimension) -> Sequence[Any]:
    if dimension.choices:
        return dimension.choices
    kind = int if dimension.integers else float
    return kind(dimension.low), kind(dimension.high)


def with_integers(dimension: Dimension, config: dict[str, Any]) -> Dimension:
    """Let a dimension have integers only where the configuration holds one, too."""
    value: Any = config
    for name in dimension.key.lstrip("+").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    held = isinstance(value, int) and not isinstance(value, bool)
    return replace(dimension, integers=dimension.integers and held)


def _given(arguments: Arguments, params: dict[str, str], known: set[str]) -> list[Dimension]:
    """Read the dimensions of `sweep.params` that the command line leaves as they are."""
    texts = tuple(f"{key}={value}" for key, value in params.items() if key not in known)
    fixed, space = split_search(replace(arguments, overrides=texts))
    problems = [
        Problem("sweep.params", f"{text}: gives one value only", hint="use key=value outside of it")
        for text in fixed
    ]
    if problems:
        raise ConfigError(problems)
    return space


def _study(sampler: str, seed: int) -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        message = "sweep=optuna takes the package optuna: pip install optuna"
        raise ConfigError(Problem("sweep", message)) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    return optuna.create_study(direction="minimize", sampler=kinds[sampler](seed=seed))


def _suggested(trial: Any, dimension: Dimension) -> Swept:
    key, low, high = dimension.key, dimension.low, dimension.high
    if dimension.choices:
        return _swept(key, trial.suggest_categorical(key, dimension.choices))
    if dimension.integers:
        return _swept(key, trial.suggest_int(key, int(low), int(high), log=dimension.log))
    return _swept(key, trial.suggest_float(key, low, high, log=dimension.log))


def _swept(key: str, value: Any) -> Swept:
    return Swept(f"{key}={value}", key.lstrip("+"), str(value), True)


def _fixed(text: str) -> Swept:
    key, _, value = text.partition("=")
    return Swept(text, key.lstrip("+~"), value, False)


def _tell(study: Any, trial: Any, it: Sweep, outcome: Outcome) -> None:
    value = None if outcome.failed else it.ranking.rank(outcome)
    if value is None:
        optuna: Any = importlib.import_module("optuna")
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, value)
