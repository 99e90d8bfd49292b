"""One step, in a process of its own: `python -m benchmarks.gpu_check.step NAME FOLDER`."""

import importlib
import os
import signal
import sys
from pathlib import Path

from benchmarks.gpu_check.steps import STEPS


def main(name: str, folder: Path) -> None:
    """Run a step; what it finds is in `FOLDER/step.json`."""
    # Shells let what they start in the background ignore the signal of the time limit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # cuBLAS reads it once, when it is first used: a part of the step may ask for determinism.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not before: these import torch.
    checks = importlib.import_module("benchmarks.gpu_check.checks").Checks(name, folder)
    run = getattr(importlib.import_module(f"benchmarks.gpu_check.{STEPS[name].module}"), name)
    with checks.part(name):
        run(checks)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
