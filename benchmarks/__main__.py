"""Measure Regimen against loops written by hand: `python -m benchmarks step`.

Prints a table and writes `benchmarks/<name>.json`. Contenders run in turn within one process, and
a ratio is taken within a turn: the machine's speed may change from turn to turn, not within one.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.cli.arguments import command_parser
from scripts.cli.console import leave_with

BENCHMARKS = {
    "step": "what the loop costs on top of the computation, for each update",
    "data": "loading and transforming images, against torchvision sample by sample",
    "start": "process start to the first update, help and a mistake, against a bare script",
    "sweep": "CPU time of a sweep of 8 jobs, against the same runs by as many commands",
    "train": "images a second of ResNet-18, against a bare loop with its data in memory",
    "evaluate": "images a second of an evaluation, against a bare loop over the same loader",
    "predict": "answers for picture files as a table, against a bare loop over the same loader",
    "growth": "cost of an update and memory as data set and run grow",
    "checkpoint": "how long a save keeps the training waiting, against a durable one by hand",
    "ddp": "throughput of one and two processes, against the same by hand",
    "cifar10_fast": "CIFAR-10 on a CPU, against a loop by hand: data.root=DIR --rounds 1",
    "gpu": "training on a GPU, against the same by hand: data.root=DIR --rounds 3",
}
SHARED = {"evaluate": "inference", "predict": "inference", "sweep": "start"}  # their modules
TAKE_OVERRIDES = ("cifar10_fast", "gpu")


def benchmark(argv: Sequence[str]) -> int:
    """Run the benchmark that is named and return the exit code. Raises ConfigError."""
    parser = command_parser("python -m benchmarks", __doc__)
    listed = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=listed)
    parser.add_argument("overrides", nargs="*", help=f"of {', '.join(TAKE_OVERRIDES)}: key=value")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and arguments.name not in TAKE_OVERRIDES:
        parser.error(f"{arguments.name} takes no overrides, only {', '.join(TAKE_OVERRIDES)} do")
    module = importlib.import_module(f"benchmarks.{SHARED.get(arguments.name, arguments.name)}")
    measure = getattr(module, arguments.name if arguments.name in SHARED else "measure")
    given = (arguments.overrides,) if arguments.name in TAKE_OVERRIDES else ()
    found = measure(arguments.rounds, *given)
    for report in found if arguments.name == "gpu" else [found]:  # a report of each of its parts
        print(report.text())
        print(f"written to {report.write(arguments.output)}", flush=True)
    return 0


if __name__ == "__main__":
    leave_with(benchmark, sys.argv[1:])
