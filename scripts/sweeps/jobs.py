"""Run the jobs of a sweep with its launcher, say how they go on, and restart the lost ones."""

import time
from collections.abc import Callable

from scripts.sweeps.leaderboard import NOT_STARTED, Job
from scripts.sweeps.sweep import Sweep
from trainer.files.layout import on_one_line
from trainer.runs.status import holds_run, read_metrics

_PATIENCE = 0.5  # seconds between two checks for signals
_EVERY = 30.0  # seconds between two lines of a job
_TAIL = 1 << 14  # bytes of a log
_STOPPED = (-15, -2, 130, 143)  # exit codes before a run exists
# Exit codes: a lost process, out of memory, and signals that the sweep did not send.
_LOST = (6, 8, 130, 143)


def run_jobs(
    it: Sweep, ask: Callable[[], Job | None], tell: Callable[[Job], None] = lambda job: None
) -> None:
    """Run jobs until there are none left or the sweep must end, up to `sweep.jobs` at a time.

    `ask` returns the next job, None after the last one. `tell` is called with each job that has
    ended and is not restarted.
    """
    launcher, said = it.launcher, _Said(it)
    most = it.settings.jobs or (None if launcher.quiet else 1)
    waiting: Job | None = None  # for room, or for its restart
    sent = 0  # signals
    while True:
        while not it.ended and (most is None or len(it.running) < most):
            waiting = waiting or ask()
            if waiting is None or it.ended or not launcher.start(waiting, it.words(waiting)):
                break
            it.running[waiting.number] = waiting
            waiting.starts += 1
            said.start(waiting)
            it.write()
            waiting = None
        if not it.running:
            return
        for job, code in launcher.wait(_PATIENCE):
            del it.running[job.number]
            if not it.heard or holds_run(job.run_dir) or code not in _STOPPED:
                job.end(code)
            lost = code < 0 or code in _LOST
            if lost and job.starts <= it.settings.retries and not it.heard:
                print(on_one_line(f"job {job.number} starts again: {job.reason}"), flush=True)
                waiting = job
                continue
            it.write()
            said.end(job)
            tell(job)
        for number in it.heard[sent:]:
            launcher.send(number)
            sent += 1
        said.progress()


class _Said:
    # A line for each start and each end, and now and then one for a long job. A job that runs alone
    # prints its result, its warnings and its error itself.

    def __init__(self, it: Sweep) -> None:
        self.it, self.began = it, time.monotonic()
        self.before = self.done = sum(job.state != NOT_STARTED for job in it.jobs)
        self.told: dict[int, float] = {}  # time of the last line of each job
        if it.launcher.quiet:
            print(it.launcher.describe(), flush=True)

    def start(self, job: Job) -> None:
        it, given = self.it, job.overrides
        self.told[job.number] = time.monotonic()
        varied = " ".join(f"{key}={given[key]}" for key in it.varied if key in given)
        again = f" (start {job.starts})" if job.starts > 1 else ""
        line = on_one_line(f"{varied}  ->  {job.run_dir}{again}")
        before = "" if it.launcher.quiet else "\n"
        print(f"{before}[{it.jobs.index(job) + 1}/{it.count}] {line}", flush=True)

    def end(self, job: Job) -> None:
        it, ranking = self.it, self.it.ranking
        self.done += job.state not in (NOT_STARTED, "preempted")  # that one goes on with the sweep
        facts = [f"{self.done} of {it.count} done"]
        if it.launcher.quiet:
            value = ranking.value(job)
            result = "" if value is None else f" {ranking.name} {value:.4f}"
            why = f": {job.reason or f'see {job.output}'}" if job.failed else ""
            facts.insert(0, on_one_line(f"job {job.number} {job.state}{result}{why}"))
        facts += [
            f"best {ranking.name} {ranking.value(best):.4f} (job {best.number})"
            for best in ranking.compared()[:1]
        ]
        done, left = self.done - self.before, it.count - self.done
        if done and left and not it.ended:
            minutes = (time.monotonic() - self.began) / done * left / 60
            about = f"{60 * minutes:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min"
            facts.append(f"about {about if minutes < 90 else f'{minutes / 60:.1f} h'} left")
        print("; ".join(facts), flush=True)

    def progress(self) -> None:
        now, metric = time.monotonic(), self.it.ranking.name
        for job in self.it.running.values():
            if now - self.told[job.number] < _EVERY:
                continue
            self.told[job.number] = now
            lines = list(read_metrics(job.run_dir, _TAIL))
            for last in lines[-1:]:
                values = [line[metric] for line in lines if isinstance(line.get(metric), float)]
                value = f", {metric} {values[-1]:.4f}" if values else ""
                epochs = (job.config.get("trainer") or {}).get("max_epochs")
                of = f" of {epochs}" if epochs else ""
                where = f"epoch {last.get('epoch')}{of}, step {last.get('step')}"
                print(f"job {job.number}: {where}{value}", flush=True)
