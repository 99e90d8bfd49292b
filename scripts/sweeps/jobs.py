"""Run the jobs of a sweep with its launcher, and restart those that were lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.sweeps import dashboard
from scripts.sweeps.display import Display, display_for
from scripts.sweeps.launchers.launcher import Ended, Launch
from scripts.sweeps.process import Outcome, note_outcome
from scripts.sweeps.sweep import Job, Sweep
from trainer.runs.status import holds_run

Asked = tuple[Outcome, Job]
_PATIENCE = 0.5  # seconds between two checks for signals and updates of the table
_STOPPED = (-15, -2, 130, 143)  # exit codes before a run exists
_LOST = (
    6,
    8,
    130,
    143,
)  # exit codes: a lost process, out of memory, and signals that the sweep did not send


@dataclass(slots=True)
class _Run:
    """The running jobs, those that wait for a restart, and the number of starts of each."""

    it: Sweep
    running: dict[int, Asked] = field(default_factory=dict)
    waiting: list[Asked] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    exhausted: bool = False

    def next(self, ask: Callable[[], Asked | None]) -> Asked | None:
        """Return the next job to run; None if there is none."""
        if not self.waiting and not self.exhausted:
            asked = ask()
            if asked is None:
                self.exhausted = True
            else:
                self.waiting.append(asked)
        return self.waiting[0] if self.waiting else None

    def is_to_run_again(self, end: Ended) -> bool:
        """Return whether the machine lost a job that has a retry left."""
        lost = end.code < 0 or end.code in _LOST
        left = self.starts[end.number] <= self.it.settings.retries
        return lost and left and self.it.stop.number is None


def run_jobs(
    it: Sweep,
    ask: Callable[[], Asked | None],
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Run jobs until there are none left or the sweep must end, up to `sweep.jobs` at a time.

    `ask` returns the next job, None after the last one. `tell` is called with each job that has
    ended and is not restarted.
    """
    run, launcher = _Run(it), it.launcher
    most = it.settings.jobs or (None if launcher.quiet else 1)
    display = display_for(it)
    try:
        while True:
            while not it.ended and (most is None or len(run.running) < most):
                asked = run.next(ask)
                if asked is None or it.ended or not _start(run, asked, display):
                    break
            if not run.running:
                return
            for end in launcher.wait(_PATIENCE):
                _note(run, end, tell, display.ended)
            for number in it.stop.heard():
                launcher.send(number)
            display.refresh([outcome for outcome, _ in run.running.values()])
    finally:
        display.close()


def _start(run: _Run, asked: Asked, display: Display) -> bool:
    """Start a job; return False if there is no room for it."""
    outcome, job = asked
    start, launcher = run.starts.get(outcome.number, 0) + 1, run.it.launcher
    if not launcher.quiet:  # it runs alone, and its own output follows
        display.started(outcome, job, start)
    if not launcher.start(_launch(run.it, asked)):
        return False
    if launcher.quiet:
        display.started(outcome, job, start)
    dashboard.link_started(run.it.folder, run.it.outcomes, outcome, run.it.varied)
    run.waiting.pop(0)
    run.running[outcome.number], run.starts[outcome.number] = asked, start
    run.it.running.add(outcome.number)
    run.it.write_leaderboard()
    return True


def _launch(it: Sweep, asked: Asked) -> Launch:
    outcome, job = asked
    strategy = outcome.config.get("strategy") or {}
    words, output = it.words(outcome, job), _output(it, outcome)
    return Launch(outcome.number, words, outcome.run_dir, output, strategy)


def _output(it: Sweep, outcome: Outcome) -> Path:
    return it.folder / "output" / f"{outcome.number}.txt"


def _note(
    run: _Run, end: Ended, tell: Callable[[Outcome], None], show: Callable[[Outcome, bool], None]
) -> None:
    outcome, job = run.running.pop(end.number)
    run.it.running.discard(end.number)
    again = run.is_to_run_again(end)
    if not run.it.stop.number or holds_run(outcome.run_dir) or end.code not in _STOPPED:
        note_outcome(outcome, end.code, end.errors)
    if outcome.failed and run.it.launcher.quiet:
        outcome.reason = outcome.reason or f"see {_output(run.it, outcome)}"
    show(outcome, again)
    if again:
        run.waiting.insert(0, (outcome, job))
        return
    run.it.write()
    tell(outcome)
