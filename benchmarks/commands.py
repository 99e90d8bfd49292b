"""How long whole commands take, beside scripts written by hand.

start: to the first update, to print help, to tell a mistake. The reference is a bare script
(`python -m benchmarks.by_hand`): torch, torchvision, one update. Times are by the clock, ratios by
the CPU's time of the process up to the mark, which other processes change less.

sweep: the CPU seconds of all processes: start, checks, jobs with their tests, leaderboard, report.

cifar10_fast: CIFAR-10 from image files on a CPU, `experiment=cifar10_fast` against the loop
`examples/airbench/by_hand.py`, each from its start to its end: imports, decoding, training and the
test with mirror images (ours moves them as well). `data.root=DIR --rounds 1` takes some six
minutes. On a busy machine the CPU seconds hold with OMP_NUM_THREADS=1: threads that wait for each
other keep a core busy.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.report import BY_HAND, OURS, Cost, Report
from regimen.conf.errors import ConfigError

JOBS = 8
JOB = ("experiment=resnet18", "model=mlp")
BARE = ("-m", "benchmarks.by_hand")
TRAIN = ("-m", "regimen.scripts.train", "experiment=resnet18")
FIRST_UPDATE = (
    *("model=mlp", "optimizer=sgd_nesterov", "trainer.max_steps=1", "trainer.limit_val_batches=0"),
    *("trainer.limit_test_batches=0", "callbacks.checkpoint=null"),
    *("callbacks.early_stopping=null", "--allow-target", "benchmarks.ours"),
    *("+callbacks.mark._target_=benchmarks.ours.Mark", "+callbacks.mark.path={}"),
)
REPOSITORY = Path(__file__).resolve().parents[1]


def start(rounds: int) -> Report:
    """Start every command `rounds` times, in turn, and compare."""
    # The uncounted turn warms the file cache and compiles.
    wall, cpu = report.split(report.in_turn(COMMANDS, rounds))
    first, bare_first = "train: first update", "bare script: first update"
    references = {name: "bare script: --help" for name in COMMANDS if name.startswith("train")}
    return Report(
        "Whole commands, by the clock",
        "s",
        wall,
        {
            "ratio_to_handwritten": report.paired(wall[first], wall[bare_first]),
            "cpu_ratio_to_handwritten": report.paired(cpu[first], cpu[bare_first]),
            "cpu_seconds_help": min(cpu["train --help"]),
            "cpu_seconds_mistake": min(cpu["train: a mistake"]),
            "cpu_seconds_argument": min(cpu["train: a wrong argument"]),
        },
        {**references, first: bare_first},
    )


def run(*arguments: str, code: int = 0) -> Cost:
    """Return what Python took with these arguments, to its mark if it is asked for one (`{}`).

    Raises RuntimeError: another exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        words = [sys.executable, *(word.replace("{}", str(mark)) for word in arguments)]
        # Bytecode is kept, as at a user's. The commands start in a folder of their own, from which
        # `benchmarks` would not be found.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        environment["PYTHONPATH"] = str(REPOSITORY)
        used, began = report.children_cpu(), time.time()
        ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        took = Cost(time.time() - began, report.children_cpu() - used)
        if ended.returncode != code:
            raise RuntimeError(f"{' '.join(words)} ended with {ended.returncode}: {ended.stderr}")
        if not any("{}" in word for word in arguments):
            return took
        marked, cpu = map(float, mark.read_text().split())
        return Cost(marked - began, cpu)


COMMANDS: dict[str, Callable[[], Cost]] = {
    "bare script: first update": partial(run, *BARE, "{}"),
    "train: first update": partial(run, *TRAIN, *FIRST_UPDATE),
    "bare script: --help": partial(run, *BARE, "--help"),
    "train --help": partial(run, *TRAIN[:2], "--help"),
    "train: a mistake": partial(run, *TRAIN, "trainer.max_epoch=1", code=2),
    "train: a wrong argument": partial(run, *TRAIN, "optimizer.lrr=1", code=2),
}


def sweep(rounds: int) -> Report:
    """Compare a sweep `rounds` times with as many lone commands."""
    swept, alone = f"sweep of {JOBS} jobs", f"{JOBS} commands"

    def ours() -> float:
        return run(*TRAIN[:2], "-m", *JOB, f"seed=range(0,{JOBS})", "run_dir=sweep").cpu

    def commands() -> float:
        return sum(run(*TRAIN[:2], *JOB, f"seed={n}", f"run_dir=run_{n}").cpu for n in range(JOBS))

    costs = report.in_turn({swept: ours, alone: commands}, rounds)
    return Report(
        f"{JOBS} jobs of {' '.join(JOB)}",
        "CPU s",
        costs,
        {"ratio_to_handwritten": report.paired(costs[swept], costs[alone])},
        {swept: alone},
    )


def cifar10_fast(rounds: int, overrides: Sequence[str] = ()) -> Report:
    """Let both train in turn, `rounds` times."""
    given = dict(word.partition("=")[::2] for word in overrides)
    root = Path(given.get("data.root", os.devnull)).absolute()
    if not (root / "train").is_dir():
        raise ConfigError(
            "cifar10_fast needs CIFAR-10 as image files: give data.root=DIR with "
            "DIR/train/<class>/* and DIR/test/<class>/*"
        )
    others = [word for word in overrides if not word.startswith("data.root=")]

    def timed(way: Callable[[], float]) -> tuple[float, float, float]:
        since, used = time.perf_counter(), report.children_cpu()
        share = way()
        return time.perf_counter() - since, report.children_cpu() - used, 100 * share

    ways = {BY_HAND: partial(_by_hand, root), OURS: partial(_ours, root, others)}
    runs = report.in_turn({name: partial(timed, way) for name, way in ways.items()}, rounds, 0)
    units = ("seconds", "CPU seconds", "% of the test images")
    values = {f"{n}, {u}": [run[i] for run in runs[n]] for i, u in enumerate(units) for n in runs}
    ratios = report.ratios(values)
    right = [statistics.median(values[f"{name}, {units[2]}"]) / 100 for name in (OURS, BY_HAND)]
    return Report(
        "CIFAR-10 from image files on a CPU, whole commands",
        "value",
        values,
        {
            "ratio_to_handwritten": ratios[f"{OURS}, seconds"],
            "cpu_ratio_to_handwritten": ratios[f"{OURS}, CPU seconds"],
            "accuracy": right[0],
            "accuracy_by_hand": right[1],
        },
        settings={"overrides": others},
    )


def _by_hand(root: Path) -> float:
    return float(_said("examples.airbench.by_hand", str(root)).splitlines()[-1])


def _ours(root: Path, overrides: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = ("--config-dir", "examples/airbench/conf", "experiment=cifar10_fast")
        _said(
            "regimen.scripts.train",
            *words,
            f"data.root={root}",
            f"run_dir={folder}/run",
            *overrides,
        )
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    tested = [line for line in map(json.loads, lines) if "test/accuracy" in line]
    return float(tested[-1]["test/accuracy"])


def _said(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    ran = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout
