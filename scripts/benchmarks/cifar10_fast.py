"""CIFAR-10 from image files on a CPU: `experiment=cifar10_fast` against a loop written by hand.

Both are commands of their own, timed from their start to their end: imports, decoding, training and
the test with mirror images (ours moves them as well). The loop is a plain one, as written in an
afternoon: convolutions of random initial weights, SGD with Nesterov momentum and one cycle, label
smoothing, crops and flips, bf16 and channels_last. `python -m scripts.benchmark cifar10_fast
data.root=DIR --rounds 1` takes some six minutes; `--rounds` repeats both. Headlines: the test
accuracies, and seconds of ours by the loop's, by the clock and of the processors: the latter hold
on a busy machine too, with OMP_NUM_THREADS=1, as threads that wait for each other there keep a core
busy.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.errors import ConfigError
from scripts.benchmarks.report import Report, Row
from trainer.errors import RunError
from trainer.runs.metrics import read_metrics

_REPOSITORY = Path(__file__).resolve().parents[2]
BY_HAND, OURS = "by hand", "Regimen"


def measure(rounds: int, overrides: Sequence[str] = ()) -> Report:
    """Let both train in turn, `rounds` times."""
    root = _root(overrides)
    others = [word for word in overrides if not word.startswith("data.root=")]
    runs: dict[str, Callable[[Path], float]] = {
        BY_HAND: lambda folder: _by_hand(root, folder),
        OURS: lambda folder: _ours(root, others, folder),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    accuracies: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                since, cpu_since = time.perf_counter(), _cpu_seconds()
                accuracies[name].append(run(Path(folder)))
                seconds[name].append(time.perf_counter() - since)
                cpu_seconds[name].append(_cpu_seconds() - cpu_since)
    rows = [
        Row(f"{name}, {unit}", statistics.median(times), min(times), max(times))
        for unit, measured in (("seconds", seconds), ("CPU seconds", cpu_seconds))
        for name, times in measured.items()
    ]
    rows += [
        Row(f"{name}, % of the test images", *_percent(shares))
        for name, shares in accuracies.items()
    ]
    return Report(
        name="cifar10_fast",
        title="CIFAR-10 from image files on a CPU, whole commands",
        unit="value",
        rows=rows,
        headlines={
            "ratio_to_handwritten": _ratio(seconds),
            "cpu_ratio_to_handwritten": _ratio(cpu_seconds),
            "accuracy": statistics.median(accuracies[OURS]),
            "accuracy_by_hand": statistics.median(accuracies[BY_HAND]),
        },
        settings={"rounds": rounds, "overrides": list(others)},
    )


def _cpu_seconds() -> float:
    """Return the user and system time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ratio(measured: dict[str, list[float]]) -> float:
    pairs = zip(measured[OURS], measured[BY_HAND], strict=True)
    return statistics.median(ours / by_hand for ours, by_hand in pairs)


def _percent(shares: Sequence[float]) -> tuple[float, float, float]:
    return 100 * statistics.median(shares), 100 * min(shares), 100 * max(shares)


def _root(overrides: Sequence[str]) -> Path:
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "data.root" and (Path(value) / "train").is_dir():
            return Path(value).absolute()
    raise ConfigError(
        "cifar10_fast needs CIFAR-10 as image files: give data.root=DIR with "
        "DIR/train/<class>/* and DIR/test/<class>/*"
    )


def _by_hand(root: Path, folder: Path) -> float:
    answer = _command([sys.executable, "-m", "scripts.benchmarks.by_hand.cifar10", str(root)])
    return float(answer.splitlines()[-1])


def _ours(root: Path, overrides: Sequence[str], folder: Path) -> float:
    words = ["experiment=cifar10_fast", f"data.root={root}", f"run_dir={folder / 'run'}"]
    _command([sys.executable, "-m", "scripts.train", *words, *overrides])
    tested = [line for line in read_metrics(folder / "run") if "test/accuracy" in line]
    return float(tested[-1]["test/accuracy"])


def _command(words: Sequence[str]) -> str:
    done = subprocess.run(
        words,
        cwd=_REPOSITORY,
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout
