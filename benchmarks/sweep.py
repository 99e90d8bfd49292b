"""What the jobs of a sweep cost: `train -m`, and the same runs by as many lone commands.

CPU seconds of all processes. The sweep's are those of the whole command: its start, checks, jobs
with their directories and tests, leaderboard and report.
"""

from __future__ import annotations

import tempfile

from benchmarks import report
from benchmarks.report import Report
from benchmarks.start import run_command

JOBS = 8
MOST_ROUNDS = 3  # half a minute each
RUN = ("experiment=resnet18", "model=mlp")


def measure(rounds: int) -> Report:
    """Run the sweep and its reference `rounds` times, at most 3, in turn, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    sweep, alone = f"sweep of {JOBS} jobs", f"{JOBS} commands"
    swept = ["-m", *RUN, f"seed=range(0,{JOBS})", "run_dir=sweep"]
    lone = [[*RUN, f"seed={n}", f"run_dir=run_{n}"] for n in range(JOBS)]
    costs = report.in_turn({sweep: lambda: _cost(swept), alone: lambda: _cost(*lone)}, rounds)
    return Report(
        name="sweep",
        title=f"{JOBS} jobs of {' '.join(RUN)}",
        unit="CPU s",
        rows=report.compared(costs, {sweep: alone}),
        headlines={"ratio_to_handwritten": report.paired(costs[sweep], costs[alone])},
        settings={"rounds": rounds, "jobs": JOBS, "run": list(RUN)},
    )


def _cost(*commands: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        before = report.children_cpu()
        for words in commands:
            run_command(["-m", "scripts.train", *words], folder)
        return report.children_cpu() - before
