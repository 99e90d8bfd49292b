"""The table that a sweep ends with, on the screen and as `leaderboard.csv`."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from callbacks.support.monitor import AUTO, Monitor
from scripts.sweeps.process import NOT_STARTED, Outcome
from trainer.files.atomic import write_text
from trainer.files.log_format import on_one_line
from trainer.metric_names import epoch_metric

FILE = "leaderboard.csv"
SHOWN = 20  # jobs of the table on the screen
_BEST = "best/"
_GAP = "  "
_NARROW = 6  # characters that a column keeps


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
        """Return jobs from the best to the worst; then those that failed, then the rest."""

        def place(job: Outcome) -> tuple[bool, bool, bool, float, int]:
            rank = self.rank(job)
            waits = job.state == NOT_STARTED
            return waits, job.failed, rank is None, rank or 0.0, job.number

        return sorted(jobs, key=place)


def write_csv(folder: Path, jobs: Sequence[Outcome], ranking: Ranking, count: int) -> None:
    """Write all jobs, ranked, with every override that was given.

    A search knows its next jobs one by one: those missing of `count` are listed without numbers.
    """
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["job", "status", *keys, ranking.name, "seconds", "run_dir"]
    writer.writerow(header)
    for job in ranking.ranked(jobs):
        value = ranking.value(job)
        overrides = [job.overrides.get(key, "") for key in keys]
        measured = "" if value is None else repr(value)
        writer.writerow([job.number, job.state, *overrides, measured, _seconds(job), job.run_dir])
    unknown = ["", NOT_STARTED, *[""] * (len(header) - 2)]
    writer.writerows([unknown] * (count - len(jobs)))
    write_text(folder / FILE, text.getvalue())


def show(folder: Path, jobs: Sequence[Outcome], ranking: Ranking, varied: Sequence[str]) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    print(f"\n{on_one_line(f'sweep {folder}')}")
    ranked = ranking.ranked(jobs)
    for line in table(_rows(ranked[:SHOWN], ranking, varied), get_terminal_size().columns):
        print(line)
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    for job in jobs:
        if job.failed:
            reason = on_one_line(job.reason or "see its output above")
            print(f"job {job.number} {job.state} (exit {job.code}): {reason}")
    print(on_one_line(f"leaderboard: {folder / FILE}"))


def _rows(jobs: Sequence[Outcome], ranking: Ranking, varied: Sequence[str]) -> list[list[str]]:
    rows = [["job", "status", *short_keys(varied), ranking.name, "seconds"]]
    for job in jobs:
        value = ranking.value(job)
        values = [job.overrides.get(key, "") for key in varied]
        measured = "" if value is None else f"{value:.4f}"
        rows.append([str(job.number), job.state, *values, measured, _seconds(job)])
    return [[on_one_line(cell) for cell in row] for row in rows]


def _seconds(job: Outcome) -> str:
    return "" if job.seconds is None else f"{job.seconds:.1f}"


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest end of each dotted key that no other of them has."""

    def ends(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]

    known = Counter(end for key in keys for end in ends(key))
    return [next((end for end in ends(key) if known[end] == 1), key) for key in keys]


def table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows as aligned lines of at most `width` characters; long cells are cut.

    Where even short cells are too many, the columns before the last two are left out.
    """
    most = max(1, (width + len(_GAP)) // (_NARROW + len(_GAP)))
    if len(rows[0]) > most:
        rows = [[*row[: most - 2], *row[-2:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > _NARROW:
        widths[widths.index(max(widths))] -= 1
    return [_GAP.join(map(_cell, row, widths)).rstrip() for row in rows]


def _cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
