"""The leaderboard of a report: as CSV, as Markdown, and for the terminal."""

import csv
import io
from collections.abc import Sequence

from scripts.sweeps.leaderboard import short_keys
from scripts.sweeps.report.gather import Found, Job
from trainer.files.log_format import on_one_line

_LONGEST = 60  # characters of a cell of the Markdown table


def header(found: Found) -> list[str]:
    """Return the names of the columns, short ones for the keys."""
    keys = short_keys(found.keys)
    return ["rank", "job", "status", *keys, found.metric, "step", *found.others, "seconds", "error"]


def row(found: Found, job: Job) -> list[str]:
    """Return the cells of a job, with numbers rounded for reading."""
    results = job.outcome.results
    others = [_shown(results.get(name)) for name in found.others]
    objective = "" if job.outcome.failed else _shown(job.objective)
    step = "" if job.step is None or job.outcome.failed else str(job.step)
    return [
        "" if job.rank is None else str(job.rank),
        str(job.outcome.number),
        job.outcome.state,
        *(short(job.values.get(key, "")) for key in found.keys),
        *(objective, step, *others),
        _seconds(job),
        on_one_line(job.outcome.reason) if job.outcome.failed else "",
    ]


def as_csv(found: Found) -> str:
    """Return all jobs with their numbers in full; keys have their whole names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(dict.fromkeys(key for job in found.jobs for key in job.values))
    names = ["rank", "job", "status", *keys, found.metric, "step", *found.others]
    writer.writerow([*names, "seconds", "run_dir", "error"])
    for job in found.jobs:
        outcome = job.outcome
        numbers = [job.objective, job.step, *(outcome.results.get(n) for n in found.others)]
        facts = ["" if number is None else repr(number) for number in numbers]
        given = [job.values.get(key, "") for key in keys]
        reason = on_one_line(outcome.reason) if outcome.failed else ""
        first = ["" if job.rank is None else job.rank, outcome.number, outcome.state]
        writer.writerow([*first, *given, *facts, _seconds(job), outcome.run_dir, reason])
    return text.getvalue()


def as_markdown(found: Found) -> str:
    """Return a table of all jobs."""
    rows = [header(found), *(row(found, job) for job in found.jobs)]
    lines = [f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in rows]
    lines.insert(1, f"|{' --- |' * len(rows[0])}")
    return "\n".join(lines) + "\n"


def for_terminal(found: Found, jobs: Sequence[Job]) -> list[list[str]]:
    """Return the rows of a narrow table: without reasons, and with test metrics only.

    What ranks the jobs and their seconds stand last, where a narrow terminal keeps them.
    """
    rows = [header(found), *(row(found, job) for job in jobs)]
    left_out = {name for name in found.others if not name.startswith("test/")}
    empty = {
        n
        for n, name in enumerate(rows[0])
        if name in left_out or not any(cells[n] for cells in rows[1:])
    }
    kept = [n for n in range(len(rows[0]) - 1) if n not in empty]
    if (objective := rows[0].index(found.metric)) in kept:
        kept.remove(objective)
        kept.insert(-1, objective)
    return [[cells[n] for n in kept] for cells in rows]


def _escaped(cell: str) -> str:
    cut = cell if len(cell) <= _LONGEST else f"{cell[: _LONGEST - 1]}…"
    return cut.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def short(value: str) -> str:
    """Return a number with three digits, and other text unchanged."""
    try:
        number = float(value)
    except ValueError:
        return on_one_line(value)
    return value if len(value) <= 7 else f"{number:.3g}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.3g}"


def _seconds(job: Job) -> str:
    return "" if job.outcome.seconds is None else f"{job.outcome.seconds:.1f}"
