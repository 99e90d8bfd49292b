"""How long whole commands take: to the first update, to print help, to tell a mistake.

The reference of the first update is `by_hand/start.py`: torch, torchvision, one step. That of the
others is the same script up to its imports. Times are by the clock, ratios by the CPU's time of
the process up to the mark, which other processes change less.
"""

from __future__ import annotations

import atexit
import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.benchmarks.report import Report, paired

MOST_ROUNDS = 10
_PLAIN = str(Path(__file__).with_name("by_hand") / "start.py")
_TRAIN = ("-m", "scripts.train")
_FIRST_UPDATE = (
    *("experiment=resnet18", "model=mlp", "optimizer=sgd_nesterov", "trainer.max_steps=1"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
    *("callbacks.checkpoint=null", "callbacks.early_stopping=null"),
    *("--allow-target", "scripts.benchmarks.start_mark"),
    "+callbacks.mark._target_=scripts.benchmarks.start_mark.Mark",
)

Times = tuple[float, float]  # seconds by the clock, and of the CPU


def measure(rounds: int) -> Report:
    """Start every command `rounds` times, at most 10, in turn, and compare."""
    turns = min(rounds, MOST_ROUNDS)
    times: dict[str, list[Times]] = {name: [] for name in COMMANDS}
    for turn in range(turns + 1):
        for name, (command, _reference) in COMMANDS.items():
            taken = command()
            if turn:  # the first warms the file cache and compiles
                times[name].append(taken)
    rows, ratios = [], {}
    for name, (_command, reference) in COMMANDS.items():
        wall = [taken[0] for taken in times[name]]
        row, _ = paired(name, wall, reference, [taken[0] for taken in times[reference]])
        _, ratios[name] = paired(
            name,
            [taken[1] for taken in times[name]],
            reference,
            [taken[1] for taken in times[reference]],
        )
        rows.append(row)
    return Report(
        name="start",
        title="Whole commands, by the clock",
        unit="s",
        rows=rows,
        headlines={
            "ratio_to_handwritten": rows[1].ratio or 0.0,
            "cpu_ratio_to_handwritten": ratios["train: first update"],
            "cpu_seconds_help": min(taken[1] for taken in times["train --help"]),
            "cpu_seconds_mistake": min(taken[1] for taken in times["train: a mistake"]),
            "cpu_seconds_argument": min(taken[1] for taken in times["train: a wrong argument"]),
        },
        settings={"rounds": turns},
    )


def _to_mark(arguments: Sequence[str], mark_argument: str) -> Times:
    """Return the times from the start of a command to its first update."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        began = time.time()
        run_command([*arguments, mark_argument.format(mark)], folder, 0)
        ended, used = mark.read_text().split()
    return float(ended) - began, float(used)


def _whole(arguments: Sequence[str], code: int) -> Times:
    """Return the times of a whole command."""
    used = children_cpu()
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        run_command(arguments, folder, code)
        return time.time() - began, children_cpu() - used


def run_command(arguments: Sequence[str], folder: str, code: int = 0) -> str:
    """Run Python with arguments in a folder; return what it prints. RuntimeError: another code."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != code:
        raise RuntimeError(f"{' '.join(arguments)} ended with {ended.returncode}: {ended.stderr}")
    return ended.stdout


@functools.cache
def command_environment() -> dict[str, str]:
    """Return an environment where bytecode is kept, as at a user's, but in a folder apart."""
    folder = tempfile.mkdtemp(prefix="regimen-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}


def children_cpu() -> float:
    """Return the CPU seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


COMMANDS: dict[str, tuple[Callable[[], Times], str]] = {
    "bare script: first update": (
        partial(_to_mark, (_PLAIN,), "{}"),
        "bare script: first update",
    ),
    "train: first update": (
        partial(_to_mark, (*_TRAIN, *_FIRST_UPDATE), "+callbacks.mark.path={}"),
        "bare script: first update",
    ),
    "bare script: --help": (partial(_whole, (_PLAIN, "--help"), 0), "bare script: --help"),
    "train --help": (partial(_whole, (*_TRAIN, "--help"), 0), "bare script: --help"),
    "train: a mistake": (
        partial(_whole, (*_TRAIN, "experiment=resnet18", "trainer.max_epoch=1"), 2),
        "bare script: --help",
    ),
    "train: a wrong argument": (
        partial(_whole, (*_TRAIN, "experiment=resnet18", "optimizer.lrr=1"), 2),
        "bare script: --help",
    ),
}
