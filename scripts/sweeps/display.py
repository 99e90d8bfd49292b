"""What a sweep says while its jobs run: lines, or one live table on a terminal."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from scripts.sweeps.leaderboard import short_keys
from scripts.sweeps.process import NOT_STARTED, Outcome
from scripts.sweeps.progress import JobProgress, in_words, progress_of, seconds_left
from scripts.sweeps.sweep import Job, Sweep
from trainer.files.layout import is_dumb
from trainer.files.log_format import on_one_line

_ROWS = 30  # of the table
_EVERY = 30.0  # seconds between two lines of a job


class Display(Protocol):
    """Is told of each job's start and end, and now and then of those that run."""

    def started(self, outcome: Outcome, job: Job, start: int) -> None:
        """Show a job that starts, for the so-and-so-manieth time."""

    def ended(self, outcome: Outcome, again: bool) -> None:
        """Show a job that has ended, and may start again."""

    def refresh(self, running: Sequence[Outcome]) -> None:
        """Show where the jobs that run stand."""

    def close(self) -> None:
        """Leave what was shown last."""


def display_for(it: Sweep) -> "Display":
    """Return a table for several jobs on a terminal, else lines."""
    if it.launcher.quiet and sys.stdout.isatty() and not is_dumb():
        return _Table(it)
    return _Lines(it)


class _Account:
    """How far the whole sweep is."""

    def __init__(self, it: Sweep) -> None:
        self.it = it
        self.began = time.monotonic()
        self.before = sum(outcome.state != NOT_STARTED for outcome in it.outcomes)
        self.done = self.before

    def end(self, outcome: Outcome) -> None:
        """Count a job that has ended, unless it goes on with the next start of the sweep."""
        self.done += outcome.state not in (NOT_STARTED, "preempted")

    def left(self, shares: Sequence[float] = ()) -> str:
        if self.it.ended:  # no other job starts
            return ""
        done = self.done - self.before + sum(shares)
        elapsed = time.monotonic() - self.began
        return in_words(seconds_left(elapsed, done, self.it.count - self.before))

    def best(self) -> str:
        ranking = self.it.ranking
        known = [o for o in self.it.outcomes if ranking.value(o) is not None and not o.failed]
        if not known:
            return ""
        best = ranking.ranked(known)[0]
        return f"best {ranking.name} {ranking.value(best):.4f} (job {best.number})"


class _Lines:
    """A line for each start and each end, and now and then one for a long job.

    A job that runs alone prints its result, its warnings and its error itself.
    """

    def __init__(self, it: Sweep) -> None:
        self.it = it
        self.account = _Account(it)
        self._told: dict[int, float] = {}  # time of the last line of each job that runs
        if it.launcher.quiet:
            print(it.launcher.describe(), flush=True)

    def started(self, outcome: Outcome, job: Job, start: int) -> None:
        """Print where a job goes."""
        self._told[outcome.number] = time.monotonic()
        place = self.it.outcomes.index(outcome) + 1
        again = f" (start {start})" if start > 1 else ""
        before = "" if self.it.launcher.quiet else "\n"
        where = on_one_line(f"{_varied(job)}  ->  {outcome.run_dir}{again}")
        print(f"{before}[{place}/{self.it.count}] {where}", flush=True)

    def ended(self, outcome: Outcome, again: bool) -> None:
        """Print how a job ended, the best so far, and the time left."""
        if again:
            print(on_one_line(f"job {outcome.number} starts again: {outcome.reason}"), flush=True)
            return
        self.account.end(outcome)
        done = f"{self.account.done} of {self.it.count} done"
        facts = [self._result(outcome), done, self.account.best(), self.account.left()]
        print("; ".join(fact for fact in facts if fact), flush=True)

    def _result(self, outcome: Outcome) -> str:
        if not self.it.launcher.quiet:
            return ""
        value = self.it.ranking.value(outcome)
        result = "" if value is None else f" {self.it.ranking.name} {value:.4f}"
        why = f": {outcome.reason}" if outcome.failed else ""
        return on_one_line(f"job {outcome.number} {outcome.state}{result}{why}")

    def refresh(self, running: Sequence[Outcome]) -> None:
        """Print where a job stands of which nothing was said for a while."""
        now, metric = time.monotonic(), self.it.ranking.name
        for outcome in running:
            if now - self._told.setdefault(outcome.number, now) < _EVERY:
                continue
            self._told[outcome.number] = now
            progress = progress_of(outcome.run_dir, outcome.config, metric)
            epoch = "" if progress.epoch is None else f", epoch {progress.epoch}"
            value = "" if progress.value is None else f", {metric} {progress.value:.4f}"
            print(f"job {outcome.number}: {progress.share:.0%}{epoch}{value}", flush=True)

    def close(self) -> None:
        """Leave the lines."""


class _Table:
    """All jobs in one table, drawn anew as they go on."""

    def __init__(self, it: Sweep) -> None:
        from rich.console import Console
        from rich.live import Live

        self.it = it
        self.account = _Account(it)
        self.running: dict[int, JobProgress] = {}
        self._title = it.launcher.describe()
        self._drawn = 0.0
        self._console = Console()
        self._live = Live(console=self._console, get_renderable=self._draw, auto_refresh=False)
        self._live.start()

    def started(self, outcome: Outcome, job: Job, start: int) -> None:
        """Show a job as running."""
        self.running[outcome.number] = JobProgress()
        self._live.refresh()

    def ended(self, outcome: Outcome, again: bool) -> None:
        """Show how a job ended."""
        self.running.pop(outcome.number, None)
        if again:
            reason = on_one_line(f"job {outcome.number} starts again: {outcome.reason}")
            self._console.print(reason, markup=False, highlight=False, soft_wrap=True)
        else:
            self.account.end(outcome)
        self._live.refresh()

    def refresh(self, running: Sequence[Outcome]) -> None:
        """Read where jobs stand, at most once a second."""
        if time.monotonic() - self._drawn < 1.0:
            return
        metric = self.it.ranking.name
        self.running = {o.number: progress_of(o.run_dir, o.config, metric) for o in running}
        self._live.refresh()
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Leave the table as it is; the leaderboard comes below."""
        self._live.stop()

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        ranking, varied = self.it.ranking, self.it.varied
        shares = [progress.share for progress in self.running.values()]
        facts = (
            f"{self.account.done} of {self.it.count} done",
            self.account.best(),
            self.account.left(shares),
        )
        table = Table()
        for name in ("job", "status", *short_keys(varied), ranking.name):
            table.add_column(name, no_wrap=True)
        shown, more = self._shown()
        for outcome in shown:
            progress = self.running.get(outcome.number)
            state = outcome.state if progress is None else f"running {progress.share:.0%}"
            value = ranking.value(outcome) if progress is None else progress.value
            cells = [outcome.overrides.get(key, "") for key in varied]
            row = (str(outcome.number), state, *cells, "" if value is None else f"{value:.4f}")
            table.add_row(*map(_plain, row))
        if more:
            table.add_row("", f"{more} more")
        said = "; ".join(fact for fact in facts if fact)
        return Group(_plain(self._title), table, _plain(said))

    def _shown(self) -> tuple[list[Outcome], int]:
        """Return as many jobs as fit: those that run, the best, those that come next."""
        jobs, ranking = self.it.outcomes, self.it.ranking
        room = max(3, min(_ROWS, self._console.size.height - 7))
        if len(jobs) <= room:
            return jobs, 0
        first = [o for o in jobs if o.number in self.running]
        first += [o for o in ranking.ranked(jobs) if o.number not in self.running]
        shown = {o.number for o in first[:room]}
        return [o for o in jobs if o.number in shown], len(jobs) - len(shown)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(on_one_line(text))


def _varied(job: Job) -> str:
    return " ".join(override.text for override in job if override.varies)
