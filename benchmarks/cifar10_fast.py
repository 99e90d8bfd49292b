"""CIFAR-10 from image files on a CPU: `experiment=cifar10_fast` against a loop written by hand.

Both are commands of their own, timed from their start to their end: imports, decoding, training and
the test with mirror images (ours moves them as well). The loop is `examples/airbench/by_hand.py`.
`python -m benchmarks cifar10_fast data.root=DIR --rounds 1` takes some six minutes. On a busy
machine the CPU seconds hold with OMP_NUM_THREADS=1: threads that wait for each other keep a core
busy.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.report import BY_HAND, OURS, Report
from conf.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]
Run = tuple[float, float, float]  # seconds, CPU seconds, percent of the test images


def measure(rounds: int, overrides: Sequence[str] = ()) -> Report:
    """Let both train in turn, `rounds` times."""
    given = dict(word.partition("=")[::2] for word in overrides)
    root = Path(given.get("data.root", ""))
    if "data.root" not in given or not (root / "train").is_dir():
        raise ConfigError(
            "cifar10_fast needs CIFAR-10 as image files: give data.root=DIR with "
            "DIR/train/<class>/* and DIR/test/<class>/*"
        )
    root = root.absolute()
    others = [word for word in overrides if not word.startswith("data.root=")]
    ways = {BY_HAND: partial(_by_hand, root), OURS: partial(_ours, root, others)}

    def timed(way: Callable[[], float]) -> Run:
        since, used = time.perf_counter(), report.children_cpu()
        share = way()
        return time.perf_counter() - since, report.children_cpu() - used, 100 * share

    runs = report.in_turn({name: partial(timed, way) for name, way in ways.items()}, rounds, 0)
    units = ("seconds", "CPU seconds", "% of the test images")
    values = {f"{n}, {u}": [run[i] for run in runs[n]] for i, u in enumerate(units) for n in runs}
    seconds, cpu, right = ((values[f"{OURS}, {u}"], values[f"{BY_HAND}, {u}"]) for u in units)
    return Report(
        "cifar10_fast",
        "CIFAR-10 from image files on a CPU, whole commands",
        "value",
        values,
        {f"{OURS}, {u}": f"{BY_HAND}, {u}" for u in units[:2]},
        {
            "ratio_to_handwritten": report.paired(*seconds),
            "cpu_ratio_to_handwritten": report.paired(*cpu),
            "accuracy": statistics.median(right[0]) / 100,
            "accuracy_by_hand": statistics.median(right[1]) / 100,
        },
        {"rounds": rounds, "overrides": others},
    )


def _by_hand(root: Path) -> float:
    words = [sys.executable, "-m", "examples.airbench.by_hand", str(root)]
    done = subprocess.run(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _ours(root: Path, overrides: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config-dir", "examples/airbench/conf", "experiment=cifar10_fast"]
        words += [f"data.root={root}", f"run_dir={folder}/run"]
        command = [sys.executable, "-m", "scripts.train", *words, *overrides]
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    tested = [line for line in map(json.loads, lines) if "test/accuracy" in line]
    return float(tested[-1]["test/accuracy"])
