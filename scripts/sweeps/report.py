"""`report.png` of a sweep, grid or search: Optuna's plots of a study."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from regimen.conf.errors import one_line
from regimen.scripts.sweeps.leaderboard import SHOWN, Job, Ranking, short_keys
from regimen.trainer.files.atomic import replacing
from regimen.trainer.runs.status import read_metrics

FILE = "report.png"
_JOBS_FOR_IMPORTANCE = 8  # finished jobs that an estimate of importance needs
_LOG_SCALE_RATIO = 30  # of the largest to the smallest value


class _Parameter(NamedTuple):
    """A swept key as Optuna knows it."""

    distribution: Any
    values: dict[int, Any]  # by the number of the job


def write_report(folder: Path, ranking: Ranking, varied: Sequence[str]) -> None:
    """Draw the jobs that have a result; print where, or why there is no picture."""
    if not ranking.compared():
        print(f"no {FILE}: no job has a result")
        return
    try:
        _draw(folder / FILE, study_of(ranking, varied), ranking.name)
    except ImportError:
        print(f"{FILE} takes two packages: pip install matplotlib optuna")
    except Exception as error:  # a picture must not end a sweep
        print(one_line(f"no {FILE}: {type(error).__name__}: {error}"))
    else:
        print(one_line(f"report: {folder / FILE}"))


def study_of(ranking: Ranking, varied: Sequence[str]) -> Any:
    """Return a study in memory, where each job is the trial of its number. Raises ImportError."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    jobs = [job for job, _ in ranking.compared()]
    parameters = _parameters(jobs, varied)
    trials = {}
    for place, job in enumerate(jobs):
        trials[job.number] = _trial(job, ranking, parameters, with_curve=place < SHOWN)
    study = optuna.create_study(direction="maximize" if ranking.larger_is_better else "minimize")
    # Optuna counts its trials from 0 without gaps: a job without a result is a failed trial.
    failed = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)
    for number in range(max(trials) + 1):
        study.add_trial(trials.get(number, failed))
    return study


def _parameters(jobs: Sequence[Job], varied: Sequence[str]) -> dict[str, _Parameter]:
    """Return the keys that differ between the jobs, by their short names."""
    keys = []
    for key in varied:
        values = {job.overrides.get(key) for job in jobs}
        if len(values) > 1:
            keys.append(key)
    parameters = {}
    for key, name in zip(keys, short_keys(keys), strict=True):
        parameters[name] = _parameter(key, jobs)
    return parameters


def _parameter(key: str, jobs: Sequence[Job]) -> _Parameter:
    """Return a key with values that are numbers, or else words."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    words = dict[int, str]()
    for job in jobs:
        if key in job.overrides:
            words[job.number] = job.overrides[key].replace("$", r"\$")  # matplotlib: no formula
    try:
        numbers = {number: float(word) for number, word in words.items()}
    except ValueError:
        numbers = {}
    if not numbers or not math.isfinite(sum(numbers.values())):
        return _Parameter(CategoricalDistribution(sorted(set(words.values()))), words)
    low = min(numbers.values())
    high = max(numbers.values())
    is_log = 0 < low < high / _LOG_SCALE_RATIO
    return _Parameter(FloatDistribution(low, high, log=is_log), numbers)


def _trial(
    job: Job, ranking: Ranking, parameters: Mapping[str, _Parameter], with_curve: bool
) -> Any:
    from optuna.trial import TrialState, create_trial

    values = {}
    distributions = {}
    for name, parameter in parameters.items():
        if job.number in parameter.values:
            values[name] = parameter.values[job.number]
            distributions[name] = parameter.distribution
    return create_trial(
        state=TrialState.PRUNED if job.state == "pruned" else TrialState.COMPLETE,
        value=ranking.value(job),
        params=values,
        distributions=distributions,
        intermediate_values=_curve(job, ranking.name) if with_curve else {},
    )


def _curve(job: Job, metric: str) -> dict[int, float]:
    """Return the values of a metric by step."""
    values = {}
    for line in read_metrics(job.run_dir):
        step = line.get("step")
        value = line.get(metric)
        if isinstance(step, int) and isinstance(value, int | float):
            values[step] = value
    return values


def _draw(file: Path, study: Any, metric: str) -> None:
    """Draw the plots of a study one below the other. Raises ImportError."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("agg")
    pictures = []
    with pyplot.rc_context(), warnings.catch_warnings():  # Optuna sets a style of its own
        warnings.simplefilter("ignore")
        for figure in _figures(study, metric):
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=110, bbox_inches="tight")
            pyplot.close(figure)
            pictures.append(Image.open(content))

    width = max(picture.width for picture in pictures)
    height = sum(picture.height for picture in pictures)
    report = Image.new("RGB", (width, height), "white")
    top = 0
    for picture in pictures:
        report.paste(picture, (0, top))
        top += picture.height
    with replacing(file) as target:  # a report is whole, or that of before
        report.save(target, "PNG")


def _figures(study: Any, metric: str) -> list[Any]:
    """Return the figures for which the study has enough finished trials."""
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as plots

    finished = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    axes = [plots.plot_intermediate_values(study)]
    if any(trial.params for trial in finished):
        axes.append(plots.plot_slice(study, target_name=metric))
        axes.append(plots.plot_parallel_coordinate(study, target_name=metric))
        if len(finished) >= _JOBS_FOR_IMPORTANCE:
            axes.append(plots.plot_param_importances(study, target_name=metric))
    return [np.ravel(plot)[0].figure for plot in axes]  # a plot is one axes, or an array of them
