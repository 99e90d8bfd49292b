"""The table that a sweep ends with, on the screen and as `leaderboard.csv`."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callbacks.support.monitor import AUTO, Monitor
from scripts.sweeps.process import Outcome
from trainer.files.atomic import write_text
from trainer.files.log_format import on_one_line
from trainer.metric_names import epoch_metric

FILE = "leaderboard.csv"
_BEST = "best/"


class Ranking:
    """Compare jobs by the metric that their checkpoints are chosen by."""

    def __init__(self, config: dict[str, Any], jobs: Sequence[Outcome]) -> None:
        nodes = [node for node in config["callbacks"].values() if node]
        modes = {
            epoch_metric(node["monitor"]): node.get("mode", AUTO)
            for node in nodes
            if node.get("monitor") not in (None, AUTO)  # there the task decides
        }
        best = (k.removeprefix(_BEST) for job in jobs for k in job.results if k.startswith(_BEST))
        name = next(best, None) or next(reversed(modes), "val/loss")
        self._monitor = Monitor(name, modes.get(name, AUTO))
        self.name = str(self._monitor.name)

    def value(self, job: Outcome) -> float | None:
        """Return a job's best value, or its last where the best was not recorded."""
        found = job.results.get(_BEST + self.name, job.results.get(self.name))
        return found if isinstance(found, int | float) else None

    def rank(self, job: Outcome) -> float | None:
        """Return a number that is smaller for a better job; None for one without a value."""
        value = self.value(job)
        return None if value is None else self._monitor.rank(value)

    def ranked(self, jobs: Sequence[Outcome]) -> list[Outcome]:
        """Return jobs from the best to the worst; those that failed come last."""

        def place(job: Outcome) -> tuple[bool, bool, float, int]:
            rank = self.rank(job)
            return job.failed, rank is None, rank or 0.0, job.number

        return sorted(jobs, key=place)


def write_csv(folder: Path, jobs: Sequence[Outcome], ranking: Ranking) -> None:
    """Write all jobs, ranked, with every override that was given."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", "status", *keys, ranking.name, "seconds", "run_dir"])
    for job in ranking.ranked(jobs):
        value = ranking.value(job)
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        overrides = [job.overrides.get(key, "") for key in keys]
        measured = "" if value is None else repr(value)
        writer.writerow([job.number, job.state, *overrides, measured, seconds, job.run_dir])
    write_text(folder / FILE, text.getvalue())


def show(folder: Path, jobs: Sequence[Outcome], ranking: Ranking, varied: Sequence[str]) -> None:
    """Print the ranked table, and why jobs failed."""
    # rich is slow to import, and only the end of a sweep needs it
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"sweep {folder}", title_justify="left", highlight=False)
    for name in ("job", "status", *varied, ranking.name, "seconds"):
        table.add_column(escape(name), overflow="fold")
    for job in ranking.ranked(jobs):
        value = ranking.value(job)
        cells = [str(job.number), job.state, *(job.overrides.get(key, "") for key in varied)]
        cells.append("" if value is None else f"{value:.4f}")
        cells.append("" if job.seconds is None else f"{job.seconds:.1f}")
        table.add_row(*map(escape, cells))
    console = Console(soft_wrap=False)
    console.print(table)
    for job in jobs:
        if job.failed:
            reason = escape(on_one_line(job.reason or "see its output above"))
            console.print(f"job {job.number} {job.state} (exit {job.code}): {reason}")
    console.print(f"leaderboard: {escape(on_one_line(folder / FILE))}", soft_wrap=True)
