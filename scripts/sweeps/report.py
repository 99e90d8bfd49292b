"""`report.png` of a sweep: the metric against each swept value, curves, and what matters."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.sweeps.leaderboard import Job, Ranking, short_keys
from trainer.files.atomic import replacing
from trainer.files.layout import on_one_line
from trainer.runs.status import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

Curves = dict[str, dict[int, float]]  # values by step, by name
FILE = "report.png"
LOSSES = ("train/epoch_loss", "val/loss")  # whose curves are drawn beside the metric's
FEWEST = 8  # finished jobs that an estimate of importance needs
_CURVES, _NAMED, _AXES, _COLUMNS = 30, 10, 12, 3  # jobs, those in the legend, keys, panels a row


def write_report(folder: Path, ranking: Ranking, varied: Sequence[str]) -> None:
    """Draw what the jobs have data for, and say where it is, or why there is nothing."""
    try:
        drawn = draw(folder / FILE, ranking, varied)
    except ImportError:
        said = f"{FILE} takes the package matplotlib: pip install matplotlib"
    except Exception as error:  # a picture must not end a sweep
        said = f"no {FILE}: {type(error).__name__}: {error}"
    else:
        said = f"report: {folder / FILE}" if drawn else f"no {FILE}: no job has a result"
    print(on_one_line(said))


@dataclass(frozen=True)
class Scale:
    """The values of a swept key on an axis: numbers, or a position for each word."""

    places: dict[int, float]  # by number of job
    words: list[str]
    log: bool

    @classmethod
    def of(cls, key: str, jobs: Sequence[Job]) -> Scale:
        """Return the scale of a key: words if any value is not a number."""
        texts = {job.number: job.overrides[key] for job in jobs if key in job.overrides}
        places: dict[int, float] = {}
        with suppress(ValueError):
            places = {number: float(text) for number, text in texts.items()}
        if not places or not all(map(math.isfinite, places.values())):
            words = sorted(set(texts.values()))
            return cls({n: float(words.index(text)) for n, text in texts.items()}, words, False)
        low, high = min(places.values()), max(places.values())
        return cls(places, [], log=low > 0 and high > 10**1.5 * low)

    def shares(self) -> dict[int, float]:
        """Return the places from 0 (the lowest) to 1 (the highest)."""
        moved = {n: math.log(x) if self.log else x for n, x in self.places.items()}
        low, high = min(moved.values()), max(moved.values())
        return {n: (x - low) / (high - low) if high > low else 0.5 for n, x in moved.items()}


def draw(file: Path, ranking: Ranking, varied: Sequence[str]) -> bool:
    """Write the picture; return False where no job has a result. Raises ImportError."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    jobs, ranked, curves = ranking.compared(), ranking.ranked(), dict[int, Curves]()
    for job in ranked[:_CURVES]:
        for line, name in itertools.product(read_metrics(job.run_dir), (ranking.name, *LOSSES)):
            value, points = line.get(name), curves.setdefault(job.number, {})
            if isinstance(value, int | float) and math.isfinite(value) and "step" in line:
                points.setdefault(name, {})[line["step"]] = float(value)
    keys = [k for k in varied if len({job.overrides.get(k) for job in ranked}) > 1][:_AXES]
    shares = importances(jobs, ranking, keys)
    drawn = [job for job in ranked if curves.get(job.number)]
    parts: list[tuple[float, Callable[[SubFigure], None]]] = []  # with their heights
    if jobs and keys:
        rows = -(-len(keys) // _COLUMNS)
        parts.append((0.5 + 3.0 * rows, partial(_values, jobs, ranking, keys)))
    if drawn:
        parts.append((4.5, partial(_draw_curves, drawn, curves, keys)))
    if jobs and keys:
        parts.append((4.0, partial(_parallel, jobs, ranking, keys)))
    if shares:
        parts.append((1.0 + 0.3 * len(shares), partial(_importance, shares)))
    if not parts:
        return False
    heights = [height for height, _ in parts]
    # Keys and values are text: `$` in them starts no formula.
    settings = {"text.parse_math": False, "font.size": 9, "axes.grid": True}
    with matplotlib.rc_context(settings):
        figure = figures.Figure(figsize=(12, sum(heights)), layout="constrained")
        places = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for place, (_, function) in zip(places, parts, strict=True):
            function(place)
        with replacing(file) as target:
            figure.savefig(target, format="png", dpi=110)
    return True


def _values(jobs: list[Job], ranking: Ranking, keys: list[str], figure: SubFigure) -> None:
    figure.suptitle(f"{ranking.name} against each value (x: pruned, star: the best)")
    panels = figure.subplots(-(-len(keys) // _COLUMNS), _COLUMNS, squeeze=False).flat
    pruned = [job for job in jobs if job.state == "pruned"]
    ended = [job for job in jobs if job.state != "pruned"]
    for key, name, axes in zip(keys, short_keys(keys), panels, strict=False):
        scale = Scale.of(key, jobs)
        for marker, size, chosen in (("o", None, ended), ("x", None, pruned), ("*", 120, jobs[:1])):
            there = [job for job in chosen if job.number in scale.places]
            heights = [ranking.value(job) for job in there]
            axes.scatter([scale.places[j.number] for j in there], heights, size, marker=marker)
        axes.set_xlabel(name)
        if scale.words:
            axes.set_xticks(range(len(scale.words)), [w[:20] for w in scale.words], rotation=15)
        elif scale.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")  # the usual one writes formulas
            axes.xaxis.set_minor_formatter("")
    for axes in list(panels):  # those without a key
        axes.set_axis_off()


def _draw_curves(
    jobs: list[Job], curves: dict[int, Curves], keys: list[str], figure: SubFigure
) -> None:
    figure.suptitle(f"learning curves of the {len(jobs)} best jobs, the best is the darkest")
    names = list(dict.fromkeys(name for job in jobs for name in curves[job.number]))
    short = dict(zip(keys, short_keys(keys), strict=True))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for place, (job, colour) in enumerate(zip(jobs, _colours(len(jobs)), strict=True)):
            values = (f"{short[k]}={job.overrides[k][:12]}" for k in keys if k in job.overrides)
            label = f"{job.number}: {', '.join(values)}"[:60] if place < _NAMED else None
            points = curves[job.number].get(name, {})
            marker = "." if len(points) < 20 else None
            axes.plot([*points], [*points.values()], color=colour, label=label, marker=marker)
        axes.set_xlabel("step")
        axes.set_title(name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


def _parallel(jobs: list[Job], ranking: Ranking, keys: list[str], figure: SubFigure) -> None:
    figure.suptitle("parallel coordinates (dotted: pruned)")
    axes = figure.subplots()
    results = {job.number: ranking.value(job) or 0.0 for job in jobs}
    scales = [*(Scale.of(key, jobs) for key in keys), Scale(results, [], False)]
    columns = [scale.shares() for scale in scales]
    for job, colour in reversed(list(zip(jobs, _colours(len(jobs)), strict=True))):  # best on top
        points = {x: shares[job.number] for x, shares in enumerate(columns) if job.number in shares}
        style = ":" if job.state == "pruned" else "-"
        axes.plot([*points], [*points.values()], style, color=colour)
    for x, (scale, shares) in enumerate(zip(scales, columns, strict=True)):
        shown = {shares[n]: f"{place:.4g}" for n, place in scale.places.items()}
        if scale.words:
            shown = {shares[n]: scale.words[int(p)][:16] for n, p in scale.places.items()}
        for y in shown if scale.words else (min(shown), max(shown)):
            axes.annotate(shown[y], (x, y), (4, 2), textcoords="offset points", fontsize=8)
    axes.set_xticks(range(len(columns)), [*short_keys(keys), ranking.name], rotation=15)
    axes.set_yticks([])


def _importance(shares: dict[str, float], figure: SubFigure) -> None:
    figure.suptitle("how much each key matters (PED-ANOVA, shares of 1)")
    names = short_keys(list(shares))[::-1]
    figure.subplots().barh(names, list(shares.values())[::-1])


def _colours(count: int) -> list[Any]:
    viridis = importlib.import_module("matplotlib").colormaps["viridis"]
    return [viridis(0.9 * n / max(1, count - 1)) for n in range(count)]


def importances(jobs: Sequence[Job], ranking: Ranking, keys: Sequence[str]) -> dict[str, float]:
    """Return each key's share, the largest first, of a grid as of a search; {} if none is known."""
    ended = [job for job in jobs if job.state != "pruned"]
    if not keys or len(ended) < FEWEST or len({ranking.value(job) for job in ended}) < 2:
        return {}
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        print("importance takes the package optuna: pip install optuna")
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    scales = {key: Scale.of(key, ended) for key in keys}
    study = optuna.create_study(direction="maximize" if ranking.larger_is_better else "minimize")
    for job in ended:
        params, kinds = dict[str, Any](), dict[str, Any]()
        for key, scale in scales.items():
            if key not in job.overrides:
                continue
            params[key] = job.overrides[key] if scale.words else scale.places[job.number]
            low, high = min(scale.places.values()), max(scale.places.values())
            number = optuna.distributions.FloatDistribution(low, high, log=scale.log)
            words = optuna.distributions.CategoricalDistribution
            kinds[key] = words(scale.words) if scale.words else number
        trial = {"params": params, "distributions": kinds, "value": ranking.value(job)}
        study.add_trial(optuna.trial.create_trial(**trial))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares: dict[str, float] = optuna.importance.get_param_importances(study)
    return shares
