"""`report.png` of a sweep: what Optuna draws of a study, for a grid as for a search."""

import io
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regimen.conf.errors import one_line
from regimen.scripts.sweeps.leaderboard import SHOWN, Job, Ranking, short_keys
from regimen.trainer.files.atomic import replacing
from regimen.trainer.runs.status import read_metrics

FILE = "report.png"
FEWEST = 8  # finished jobs that an estimate of importance needs


def write_report(folder: Path, ranking: Ranking, varied: Sequence[str]) -> None:
    """Draw the jobs that have a result, and say where, or why there is no picture."""
    said = f"no {FILE}: no job has a result"
    try:
        if ranking.compared():
            _draw(folder / FILE, study_of(ranking, varied), ranking.name)
            said = f"report: {folder / FILE}"
    except ImportError:
        said = f"{FILE} takes two packages: pip install matplotlib optuna"
    except Exception as error:  # a picture must not end a sweep
        said = f"no {FILE}: {type(error).__name__}: {error}"
    print(one_line(said))


def study_of(ranking: Ranking, varied: Sequence[str]) -> Any:
    """Return a study in memory, where each job is the trial of its number. Raises ImportError."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    jobs, states, make = ranking.compared(), optuna.trial.TrialState, optuna.trial.create_trial
    keys = [key for key in varied if len({job.overrides.get(key) for job in jobs}) > 1]
    places = [(n, *_scale(key, jobs)) for key, n in zip(keys, short_keys(keys), strict=True)]
    trials = {}
    for rank, job in enumerate(jobs):
        own = [(name, kind, of[job.number]) for name, kind, of in places if job.number in of]
        trials[job.number] = make(
            state=states.PRUNED if job.state == "pruned" else states.COMPLETE,
            value=ranking.value(job),
            params={name: place for name, _, place in own},
            distributions={name: kind for name, kind, _ in own},
            intermediate_values=_curve(job, ranking.name) if rank < SHOWN else {},
        )
    study = optuna.create_study(direction="maximize" if ranking.larger_is_better else "minimize")
    study.add_trials(trials.get(n) or make(state=states.FAIL) for n in range(max(trials) + 1))
    return study


def _scale(key: str, jobs: Sequence[Job]) -> tuple[Any, dict[int, Any]]:
    """Return how a key is distributed, and its value by number of job: numbers, or else words."""
    from optuna import distributions

    texts = {job.number: job.overrides[key] for job in jobs if key in job.overrides}
    words = {number: text.replace("$", r"\$") for number, text in texts.items()}  # no formula
    with suppress(ValueError):
        numbers = {number: float(word) for number, word in words.items()}
        low, high = min(numbers.values()), max(numbers.values())
        if math.isfinite(sum(numbers.values())):
            return distributions.FloatDistribution(low, high, log=0 < low < high / 30), numbers
    return distributions.CategoricalDistribution(sorted(set(words.values()))), words


def _curve(job: Job, metric: str) -> dict[int, float]:
    pairs = ((line.get("step"), line.get(metric)) for line in read_metrics(job.run_dir))
    return {n: v for n, v in pairs if isinstance(n, int) and isinstance(v, int | float)}


def _draw(file: Path, study: Any, metric: str) -> None:
    """Draw the study, its pictures one below the other. Raises ImportError."""
    import matplotlib
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    matplotlib.use("agg")
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    chosen = [plots.plot_slice, plots.plot_parallel_coordinate]
    chosen += [plots.plot_param_importances] * (len(ended) >= FEWEST)
    sheets = []
    with pyplot.rc_context(), warnings.catch_warnings():  # Optuna sets a style of its own
        warnings.simplefilter("ignore")
        axes = [plots.plot_intermediate_values(study)]
        if any(trial.params for trial in ended):
            axes += [plot(study, target_name=metric) for plot in chosen]
        for panel in axes:
            figure, content = np.ravel(panel)[0].figure, io.BytesIO()
            figure.savefig(content, format="png", dpi=110, bbox_inches="tight")
            pyplot.close(figure)
            sheets.append(Image.open(content))
    width, height = max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)
    whole, top = Image.new("RGB", (width, height), "white"), 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    with replacing(file) as target:
        whole.save(target, "PNG")
