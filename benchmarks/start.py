"""How long whole commands take: to the first update, to print help, to tell a mistake; a sweep.

The reference is a bare script, which is this module as a command: torch, torchvision, one update.
Times are by the clock, ratios by the CPU's time of the process up to the mark, which other
processes change less.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import report
from benchmarks.report import Cost, Report

MOST_ROUNDS, MOST_SWEEPS = 10, 3  # half a minute for each round of the sweep
JOBS = 8
JOB = ("experiment=resnet18", "model=mlp")
BARE = ("-m", "benchmarks.start")
TRAIN = ("-m", "scripts.train", "experiment=resnet18")
FIRST_UPDATE = (
    *("model=mlp", "optimizer=sgd_nesterov", "trainer.max_steps=1", "trainer.limit_val_batches=0"),
    *("trainer.limit_test_batches=0", "callbacks.checkpoint=null"),
    *("callbacks.early_stopping=null", "--allow-target", "benchmarks.ours"),
    *("+callbacks.mark._target_=benchmarks.ours.Mark", "+callbacks.mark.path={}"),
)


def bare(mark: Path) -> None:
    """Train for one update, and note when it is done."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = cross_entropy(model(torch.rand(128, 1, 16, 16)), torch.zeros(128).long())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mark.write_text(f"{time.time()} {time.process_time()}")


def measure(rounds: int) -> Report:
    """Start every command `rounds` times, at most 10, in turn, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    # The uncounted turn warms the file cache and compiles.
    wall, cpu = report.split(report.in_turn(COMMANDS, rounds))
    first, bare_first = "train: first update", "bare script: first update"
    references = {name: "bare script: --help" for name in COMMANDS if name.startswith("train")}
    return Report(
        "start",
        "Whole commands, by the clock",
        "s",
        wall,
        {**references, first: bare_first},
        {
            "ratio_to_handwritten": report.paired(wall[first], wall[bare_first]),
            "cpu_ratio_to_handwritten": report.paired(cpu[first], cpu[bare_first]),
            "cpu_seconds_help": min(cpu["train --help"]),
            "cpu_seconds_mistake": min(cpu["train: a mistake"]),
            "cpu_seconds_argument": min(cpu["train: a wrong argument"]),
        },
        {"rounds": rounds},
    )


def run(*arguments: str, code: int = 0) -> Cost:
    """Return what Python took with these arguments, to its mark if it is asked for one (`{}`).

    Raises RuntimeError: another exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        words = [sys.executable, *(word.replace("{}", str(mark)) for word in arguments)]
        environment, used, began = command_environment(), report.children_cpu(), time.time()
        ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        took = Cost(time.time() - began, report.children_cpu() - used)
        if ended.returncode != code:
            raise RuntimeError(f"{' '.join(words)} ended with {ended.returncode}: {ended.stderr}")
        if not any("{}" in word for word in arguments):
            return took
        marked, cpu = map(float, mark.read_text().split())
        return Cost(marked - began, cpu)


@functools.cache
def command_environment() -> dict[str, str]:
    """Return an environment where bytecode is kept, as at a user's, but in a folder apart."""
    folder = tempfile.mkdtemp(prefix="regimen-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}


COMMANDS: dict[str, Callable[[], Cost]] = {
    "bare script: first update": partial(run, *BARE, "{}"),
    "train: first update": partial(run, *TRAIN, *FIRST_UPDATE),
    "bare script: --help": partial(run, *BARE, "--help"),
    "train --help": partial(run, *TRAIN[:2], "--help"),
    "train: a mistake": partial(run, *TRAIN, "trainer.max_epoch=1", code=2),
    "train: a wrong argument": partial(run, *TRAIN, "optimizer.lrr=1", code=2),
}


def sweep(rounds: int) -> Report:
    """Compare the CPU seconds of a sweep, at most 3 times, with those of as many lone commands.

    They are those of all processes: start, checks, jobs with their tests, leaderboard and report.
    """
    rounds = min(rounds, MOST_SWEEPS)
    swept, alone = f"sweep of {JOBS} jobs", f"{JOBS} commands"
    train = ("-m", "scripts.train")

    def ours() -> float:
        return run(*train, "-m", *JOB, f"seed=range(0,{JOBS})", "run_dir=sweep").cpu

    def commands() -> float:
        return sum(run(*train, *JOB, f"seed={n}", f"run_dir=run_{n}").cpu for n in range(JOBS))

    costs = report.in_turn({swept: ours, alone: commands}, rounds)
    return Report(
        "sweep",
        f"{JOBS} jobs of {' '.join(JOB)}",
        "CPU s",
        costs,
        {swept: alone},
        {"ratio_to_handwritten": report.paired(costs[swept], costs[alone])},
        {"rounds": rounds, "jobs": JOBS, "run": list(JOB)},
    )


if __name__ == "__main__":
    import torchvision  # noqa: F401 (most scripts have its transforms)

    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path)
    bare(parser.parse_args().mark)
