"""How much each swept key matters for the objective, as Optuna estimates it."""

import importlib
import importlib.util
import warnings
from typing import Any

from scripts.sweeps.report.gather import Found, Job
from scripts.sweeps.report.scale import Scale, scale_of

FEWEST = 8  # jobs that an estimate needs


def importances(found: Found) -> dict[str, float]:
    """Return each key's share, the largest first; {} if there is no estimate.

    By PED-ANOVA over the completed jobs, of a grid as of a search.
    """
    if why_none(found) is not None:
        return {}
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    scales = [scale_of(key, found.ended) for key in found.keys]
    direction = "maximize" if found.larger_is_better else "minimize"
    study = optuna.create_study(direction=direction)
    distributions = {scale.key: _distribution(optuna, scale, found.ended) for scale in scales}
    study.add_trials([_trial(optuna, job, scales, distributions) for job in found.ended])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares: dict[str, float] = optuna.importance.get_param_importances(study)
    return shares


def why_none(found: Found) -> str | None:
    """Return why there is no importance, if there is none."""
    if not found.keys:
        return "nothing varies"
    if len(found.ended) < FEWEST:
        return f"importance takes {FEWEST} finished jobs or more"
    if len({job.objective for job in found.ended}) < 2:
        return "all jobs have the same result"
    if importlib.util.find_spec("optuna") is None:
        return "importance takes the package optuna: pip install optuna"
    return None


def _distribution(optuna: Any, scale: Scale, jobs: list[Job]) -> Any:
    kinds = optuna.distributions
    if scale.words:
        return kinds.CategoricalDistribution(scale.words)
    places = [place for job in jobs if (place := scale.place(job)) is not None]
    return kinds.FloatDistribution(min(places), max(places), log=scale.log)


def _trial(optuna: Any, job: Job, scales: list[Scale], distributions: dict[str, Any]) -> Any:
    there = [s for s in scales if s.key in job.values]
    values = {s.key: job.values[s.key] if s.words else s.place(job) for s in there}
    return optuna.trial.create_trial(
        params=values,
        distributions={key: distributions[key] for key in values},
        value=job.objective,
    )
