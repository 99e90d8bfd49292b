"""`train -m sweep=optuna key=interval(a,b) ...`: Optuna chooses the values of each next job."""

import importlib
from dataclasses import replace
from typing import Any

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import Arguments
from scripts.composition.compose import compose, split_search
from scripts.composition.overrides import Dimension, Swept
from scripts.sweeps.sweep import Sweep, sweep_folder


def search(arguments: Arguments) -> int:
    """Run `sweep.n_trials` jobs, and return the first failed one's exit code.

    The search is a function of the seed and of what the jobs return. A job that fails tells Optuna
    nothing, and the search goes on.
    """
    fixed, space = split_search(arguments)
    config = compose(replace(arguments, overrides=tuple(fixed), multirun=False)).config
    settings = config["sweep"]
    space += _given(arguments, settings["params"], {dimension.key for dimension in space})
    if not space:
        message = "nothing to search: give a key as interval(a,b) or choice(a,b)"
        raise ConfigError(Problem("sweep.params", message))
    study = _study(settings["sampler"], config["seed"])
    it: Sweep | None = None
    for _ in range(settings["n_trials"]):
        trial = study.ask()
        job = [_fixed(text) for text in fixed] + [_suggested(trial, each) for each in space]
        compose(replace(arguments, overrides=tuple(o.text for o in job), multirun=False))
        it = it or Sweep(arguments, config, sweep_folder(config), settings["n_trials"])
        outcome = it.plan(job)
        it.run(outcome, job)
        if it.stop.number is not None:
            break
        _tell(study, trial, it)
    assert it is not None
    return it.close([dimension.key for dimension in space])


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
    key = dimension.key
    if dimension.choices:
        value = trial.suggest_categorical(key, dimension.choices)
    elif dimension.integers:
        value = trial.suggest_int(key, dimension.low, dimension.high, log=dimension.log)
    else:
        value = trial.suggest_float(key, dimension.low, dimension.high, log=dimension.log)
    return Swept(f"{key}={value}", key, str(value), True)


def _fixed(text: str) -> Swept:
    key, _, value = text.partition("=")
    return Swept(text, key.lstrip("+~"), value, False)


def _tell(study: Any, trial: Any, it: Sweep) -> None:
    outcome, ranking = it.outcomes[-1], it.ranking
    value = None if outcome.failed else ranking.rank(outcome)
    if value is None:
        optuna: Any = importlib.import_module("optuna")
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, value)
