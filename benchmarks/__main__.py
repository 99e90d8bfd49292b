"""Measure Regimen against loops written by hand: `python -m benchmarks step`.

Prints a table and writes `benchmarks/<name>.json`. Contenders run in turn within one process, and
a ratio is taken within a turn: the machine's speed may change from turn to turn, not within one.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from regimen.scripts.cli.arguments import command_parser
from regimen.scripts.cli.console import run_and_exit

BENCHMARKS = {  # their modules, and what they measure
    "step": ("loop", "what the loop costs on top of the computation, for each update"),
    "data": ("data", "loading and transforming images, against torchvision sample by sample"),
    "start": ("commands", "to the first update, help and a mistake, against a bare script"),
    "sweep": ("commands", "CPU time of a sweep of 8 jobs, against as many commands"),
    "train": ("images", "images/s of ResNet-18, against a bare loop with its data in memory"),
    "evaluate": ("images", "images/s of an evaluation, against a bare loop, the same loader"),
    "predict": ("images", "answers for picture files as a table, against a bare loop"),
    "tokens": ("tokens", "learnt tokens/s of a language model, packed rows, against a bare loop"),
    "growth": ("runs", "cost of an update and memory as data set and run grow"),
    "checkpoint": ("runs", "how long a save keeps the training waiting, against one by hand"),
    "ddp": ("loop", "throughput of one and two processes, against the same by hand"),
    "cifar10_fast": ("commands", "CIFAR-10 on a CPU by a plain loop: data.root=DIR --rounds 1"),
    "gpu": (
        "gpu",
        "training on an accelerator, against the same by hand: data.root=DIR",
    ),
}
MOST = {
    "start": 10,
    "sweep": 3,
    "train": 2,
    "evaluate": 12,
    "tokens": 5,
    "growth": 5,
    "checkpoint": 15,
}  # rounds
TAKE_OVERRIDES = ("cifar10_fast", "gpu")


def benchmark(argv: Sequence[str]) -> int:
    """Run the benchmark that is named and return the exit code. Raises ConfigError."""
    parser = command_parser("python -m benchmarks", __doc__)
    listed = "; ".join(f"{name}: {text}" for name, (_, text) in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=listed)
    parser.add_argument("overrides", nargs="*", help=f"of {', '.join(TAKE_OVERRIDES)}: key=value")
    parser.add_argument("--rounds", type=int, default=40, help=f"turns of each; at most: {MOST}")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder")
    arguments = parser.parse_intermixed_args(argv)
    name = arguments.name
    rounds = min(arguments.rounds, MOST.get(name, arguments.rounds))
    if arguments.overrides and name not in TAKE_OVERRIDES:
        parser.error(f"{name} takes no overrides, only {', '.join(TAKE_OVERRIDES)} do")
    measure = getattr(importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}"), name)
    found = measure(rounds, *([arguments.overrides] if name in TAKE_OVERRIDES else []))
    for part, report in found if name == "gpu" else [(name, found)]:
        path = arguments.output / f"{part}.json"
        report.write(path, rounds)
        print(f"{report.text()}\nwritten to {path}", flush=True)
    return 0


if __name__ == "__main__":
    run_and_exit(benchmark, sys.argv[1:])
