"""The pictures of a report, by matplotlib: PNG."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scripts.sweeps.leaderboard import short_keys
from scripts.sweeps.report.gather import LOSSES, Found, Job
from scripts.sweeps.report.scale import Scale, fractions, placed, scale_of
from scripts.sweeps.report.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = 30  # jobs, the best ones, whose curves are drawn
_NAMED = 10  # of them, those that the legend names
_AXES = 12  # keys of a picture
_COLUMNS = 3  # of panels


def why_none() -> str | None:
    """Return why there are no pictures, if there can be none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "pictures take the package matplotlib: pip install matplotlib"
    return None


def pictures(found: Found, shares: Mapping[str, float]) -> dict[str, bytes]:
    """Return the pictures that the jobs have data for, by name. Needs matplotlib."""
    from matplotlib import rc_context

    draws: dict[str, Callable[[Figure], object]] = {}
    if found.ranked and found.keys:
        draws["objective"] = lambda figure: _objective(figure, found)
        draws["parallel"] = lambda figure: _parallel(figure, found)
    if any(job.curves for job in found.jobs):
        draws["curves"] = lambda figure: _curves(figure, found)
    if shares:
        draws["importance"] = lambda figure: _importance(figure, shares)
    # Keys and values are text: `$` in them starts no formula.
    with rc_context({"text.parse_math": False, "font.size": 9, "axes.grid": True}):
        return {name: _png(draw) for name, draw in draws.items()}


def _png(draw: Callable[[Figure], object]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _objective(figure: Figure, found: Found) -> None:
    """Draw the objective against each swept value."""
    keys = found.keys[:_AXES]
    for axes, key, name in zip(_panels(figure, len(keys)), keys, short_keys(keys), strict=False):
        scale = scale_of(key, found.ranked)
        for state, marker in (("finished", "o"), ("pruned", "x")):
            there = [
                j for j in found.ranked if (j.outcome.state == "pruned") == (state == "pruned")
            ]
            points = placed(there, scale)
            if points:
                xs, ys = [x for x, _ in points], [job.height for _, job in points]
                axes.scatter(xs, ys, marker=marker, alpha=0.8, label=state)
        best = placed(found.ended[:1], scale)
        axes.scatter(
            [x for x, _ in best], [j.height for _, j in best], marker="*", s=120, label="best"
        )
        _name_axis(axes, scale, name)
        axes.set_ylabel(found.metric)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)


def _curves(figure: Figure, found: Found) -> None:
    """Draw the curves of the objective and of the losses side by side."""
    drawn = [job for job in found.jobs if job.curves][:_CURVES]
    names = dict.fromkeys((found.metric, *LOSSES))
    there = [name for name in names if any(name in job.curves for job in drawn)]
    colours = _colours(drawn)
    keys = dict(zip(found.keys, short_keys(found.keys), strict=True))
    for axes, name in zip(_panels(figure, len(there)), there, strict=False):
        for place, job in enumerate(drawn):
            if curve := job.curves.get(name):
                label = _label(job, keys) if place < _NAMED else None
                style: dict[str, Any] = {"color": colours[place], "label": label}
                style["marker"] = "." if len(curve) < 20 else None
                axes.plot([step for step, _ in curve], [value for _, value in curve], **style)
        axes.set_xlabel("step")
        axes.set_title(name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)


def _parallel(figure: Figure, found: Found) -> None:
    """Draw each job as a line through its values to its objective."""
    keys = found.keys[:_AXES]
    figure.set_size_inches(max(6.0, 1.8 * (len(keys) + 1)), 4.2)
    axes = figure.add_subplot()
    jobs = found.ranked
    scales = [scale_of(key, jobs) for key in keys]
    columns = [_column(scale, jobs) for scale in scales]
    columns.append(fractions({n: job.height for n, job in enumerate(jobs)}, False))
    colours = _colours(jobs)
    for n, job in reversed(list(enumerate(jobs))):  # the best on top
        points = [(x, column[n]) for x, column in enumerate(columns) if n in column]
        style = ":" if job.outcome.state == "pruned" else "-"
        axes.plot(*zip(*points, strict=True), style, color=colours[n], linewidth=2 if not n else 1)
    for x, scale in enumerate(scales):
        _mark(axes, x, scale, jobs)
    ends = [job.height for job in jobs]
    for y, value in {0.0: min(ends), 1.0: max(ends)}.items():
        axes.annotate(f"{value:.4g}", (len(keys), y), xytext=(5, 0), textcoords="offset points")
    axes.set_xticks(range(len(columns)), [*short_keys(keys), found.metric], rotation=15)
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(keys) + 0.6)


def _importance(figure: Figure, shares: Mapping[str, float]) -> None:
    figure.set_size_inches(6.0, 0.8 + 0.3 * len(shares))
    axes = figure.add_subplot()
    names = short_keys(list(shares))[::-1]
    axes.barh(names, list(shares.values())[::-1])
    axes.set_xlabel("importance (share of 1)")


def _panels(figure: Figure, count: int) -> list[Axes]:
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure.set_size_inches(4.0 * columns, 3.2 * rows + (0.9 if rows == 1 else 0.0))
    return [figure.add_subplot(rows, columns, n + 1) for n in range(count)]


def _name_axis(axes: Axes, scale: Scale, name: str) -> None:
    axes.set_xlabel(name)
    if scale.words:
        axes.set_xticks(range(len(scale.words)), [word[:20] for word in scale.words], rotation=15)
        axes.set_xlim(-0.5, len(scale.words) - 0.5)
    elif scale.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def _column(scale: Scale, jobs: list[Job]) -> dict[int, float]:
    places = {n: place for n, job in enumerate(jobs) if (place := scale.place(job)) is not None}
    return fractions(places, scale.log)


def _mark(axes: Axes, x: int, scale: Scale, jobs: list[Job]) -> None:
    """Write the values of an axis of the parallel coordinates: all words, or both ends."""
    column = _column(scale, jobs)
    texts = {round(column[n], 6): jobs[n].values[scale.key] for n in column}
    shown = texts if scale.words else {y: texts[y] for y in (min(texts), max(texts))}
    for y, text in shown.items():
        label = text[:16] if scale.words else f"{float(text):.4g}"
        axes.annotate(label, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=8)
    axes.axvline(x, color="0.8", linewidth=1, zorder=0)


def _colours(jobs: list[Job]) -> list[Any]:
    """Return a colour for each job, by its place: the best is the darkest."""
    from matplotlib import colormaps

    last = max(1, len(jobs) - 1)
    return [colormaps["viridis"](0.9 * n / last) for n in range(len(jobs))]


def _label(job: Job, names: Mapping[str, str]) -> str:
    values = ", ".join(f"{names[k]}={short(v)[:12]}" for k, v in job.values.items() if k in names)
    return f"{job.outcome.number}: {values}"[:60]
