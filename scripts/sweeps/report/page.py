"""The page of a report: one HTML file that needs no server and no network."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from scripts.sweeps.leaderboard import short_keys
from scripts.sweeps.report.gather import Found
from scripts.sweeps.report.tables import header, row

_TITLES = {
    "objective": "{metric} against each value",
    "curves": "Learning curves of the best jobs",
    "parallel": "Parallel coordinates (dotted: pruned)",
    "importance": "Importance of each key",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
img { max-width: 100%; height: auto }
div.table { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; text-align: left; white-space: nowrap; border-bottom: 1px solid #ddd }
th { border-bottom: 2px solid #888 } tr:hover td { background: #f3f6fa }
tr.failed td { color: #a40000 } tr.pruned td { color: #777 } td.error { white-space: normal }
code { background: #f3f3f3; padding: .1em .3em }
"""


def page(found: Found, pictures: Mapping[str, bytes], notes: Sequence[str]) -> str:
    """Return the page; `notes` explain which parts are missing."""
    title = f"Sweep {found.folder.name}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary(found))}</p>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        *_best(found),
        *(_picture(name, pictures[name], found) for name in _TITLES if name in pictures),
        "<h2>Leaderboard</h2>",
        *_table(found),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def summary(found: Found) -> str:
    """Return one line with the number of jobs in each state."""
    states: dict[str, int] = {}
    for job in found.jobs:
        states[job.outcome.state] = states.get(job.outcome.state, 0) + 1
    if found.unknown:
        states["not started"] = states.get("not started", 0) + found.unknown
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    better = "larger" if found.larger_is_better else "smaller"
    return f"{found.folder}: {counts or 'no jobs'}; {found.metric} decides, {better} is better."


def _best(found: Found) -> list[str]:
    best = next((job for job in found.jobs if job.rank == 1), None)
    if best is None:
        return []
    keys = zip(found.keys, short_keys(found.keys), strict=True)
    values = ", ".join(f"{name}={best.values[k]}" for k, name in keys if k in best.values)
    at = "" if best.step is None else f" at step {best.step}"
    text = f"Best: job {best.outcome.number} ({values or 'nothing varies'}), "
    text += f"{found.metric} {best.objective:.6g}{at}, in "
    return [f"<p>{escape(text)}<code>{escape(str(best.outcome.run_dir))}</code></p>"]


def _picture(name: str, content: bytes, found: Found) -> str:
    title = escape(_TITLES[name].format(metric=found.metric))
    data = base64.b64encode(content).decode()
    return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{data}">'


def _table(found: Found) -> list[str]:
    cells = "".join(f"<th>{escape(name)}</th>" for name in header(found))
    lines = ['<div class="table"><table>', f"<thead><tr>{cells}</tr></thead><tbody>"]
    for job in found.jobs:
        *values, error = row(found, job)
        kind = "failed" if job.outcome.failed else job.outcome.state
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(
            f'<tr class="{escape(kind)}">{cells}<td class="error">{escape(error)}</td></tr>'
        )
    return [*lines, "</tbody></table></div>"]
