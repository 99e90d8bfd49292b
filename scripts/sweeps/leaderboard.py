"""The table that a sweep ends with, on the screen and as `leaderboard.csv`."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from shutil import get_terminal_size

from scripts.sweeps.groups import Groups
from scripts.sweeps.process import NOT_STARTED, Outcome
from scripts.sweeps.ranking import Ranking
from trainer.files.atomic import write_text
from trainer.files.layout import aligned
from trainer.files.log_format import on_one_line

FILE = "leaderboard.csv"
SHOWN = 20  # jobs of the table on the screen
_RUNNING = "running"


def write_csv(
    folder: Path,
    jobs: Sequence[Outcome],
    ranking: Ranking,
    groups: Groups,
    count: int,
    running: Collection[int] = (),
) -> None:
    """Write all jobs, ranked, with every override that was given and the statistics of its group.

    A search knows its next jobs one by one: those missing of `count` are listed without numbers.
    `running`: the numbers of the jobs that run now.
    """
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["job", "status", *keys, ranking.name, "seconds", "run_dir", *groups.header]
    writer.writerow(header)
    for job in ranking.ranked(jobs):
        value = ranking.value(job)
        overrides = [job.overrides.get(key, "") for key in keys]
        measured = "" if value is None else repr(value)
        facts = [measured, _seconds(job), job.run_dir, *groups.cells(job, repr)]
        state = _RUNNING if job.number in running else job.state
        writer.writerow([job.number, state, *overrides, *facts])
    unknown = ["", NOT_STARTED, *[""] * (len(header) - 2)]
    writer.writerows([unknown] * (count - len(jobs)))
    write_text(folder / FILE, text.getvalue())


def show(
    folder: Path,
    jobs: Sequence[Outcome],
    ranking: Ranking,
    groups: Groups,
    varied: Sequence[str],
) -> None:
    """Print the best jobs as a table, and why jobs failed, each reason on a line of its own."""
    print(f"\n{on_one_line(f'sweep {folder}')}")
    ranked = ranking.ranked(jobs)
    _print_table(_rows(ranked[:SHOWN], ranking, varied))
    if len(ranked) > SHOWN:
        print(f"and {len(ranked) - SHOWN} more jobs in {FILE}")
    if groups.keys:
        print(f"\n{ranking.name} over {', '.join(groups.keys)}")
        _print_table(_group_rows(groups, varied))
    for job in jobs:
        if job.failed:
            reason = on_one_line(job.reason or "see its output above")
            print(f"job {job.number} {job.state} (exit {job.code}): {reason}")
    print(on_one_line(f"leaderboard: {folder / FILE}"))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    cells = [[on_one_line(cell) for cell in row] for row in rows]
    for line in aligned(cells, get_terminal_size().columns, last=2):
        print(line)


def _group_rows(groups: Groups, varied: Sequence[str]) -> list[list[str]]:
    shared = [key for key in varied if key not in groups.keys]
    rows = [[*short_keys(shared), *groups.header]]
    for job in groups.best_first()[:SHOWN]:
        statistics = groups.cells(job, lambda value: f"{value:.4f}")
        rows.append([*(job.overrides.get(key, "") for key in shared), *statistics])
    return rows


def _rows(jobs: Sequence[Outcome], ranking: Ranking, varied: Sequence[str]) -> list[list[str]]:
    rows = [["job", "status", *short_keys(varied), ranking.name, "seconds"]]
    for job in jobs:
        value = ranking.value(job)
        values = [job.overrides.get(key, "") for key in varied]
        measured = "" if value is None else f"{value:.4f}"
        rows.append([str(job.number), job.state, *values, measured, _seconds(job)])
    return rows


def _seconds(job: Outcome) -> str:
    return "" if job.seconds is None else f"{job.seconds:.1f}"


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest end of each dotted key that no other of them has."""

    def ends(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]

    known = Counter(end for key in keys for end in ends(key))
    return [next((end for end in ends(key) if known[end] == 1), key) for key in keys]
