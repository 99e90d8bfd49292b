"""What the jobs of a sweep cost: `train -m`, and the same runs one after another in one process.

CPU seconds of all processes. The sweep's are those of the whole command: its start, checks, fork
server, jobs with their directories and tests, leaderboard and report. The reference has imported
everything before its clock starts: `build(compose([...]).config).trainer.fit()` for each run.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path

from scripts.benchmarks.report import Report, paired
from scripts.benchmarks.start import children_cpu, run_command
from scripts.composition.compose import compose
from scripts.sweeps.launchers.warm import import_all, modules_of

JOBS = 20
MOST_ROUNDS = 3  # half a minute each
_RUN = ("experiment=resnet18", "model=mlp")
_REFERENCE = "runs composed, built and fitted"
_FITTED = "runs built and fitted"
_CALL = "from scripts.benchmarks.sweep import one_after_another as run; print(*run())"


def measure(rounds: int) -> Report:
    """Run the sweep and its reference `rounds` times, at most 3, in turn, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    swept, composed, fitted = [], [], []
    for turn in range(rounds + 1):
        took, (composing, fitting) = _sweep(), _reference()
        if turn:  # the first warms the file cache and compiles
            swept.append(took)
            fitted.append(fitting)
            composed.append(composing + fitting)
    rows = [paired(_REFERENCE, composed, _REFERENCE, composed)[0]]
    rows.append(paired(_FITTED, fitted, _REFERENCE, composed)[0])
    row, ratio = paired(f"sweep of {JOBS} jobs", swept, _REFERENCE, composed)
    again, ratio_to_fitted = paired("the same sweep", swept, _FITTED, fitted)
    rows += [row, again]
    return Report(
        name="sweep",
        title=f"{JOBS} jobs of {' '.join(_RUN)}",
        unit="CPU s",
        rows=rows,
        headlines={"ratio_to_handwritten": ratio, "ratio_to_built_and_fitted": ratio_to_fitted},
        settings={"rounds": rounds, "jobs": JOBS, "run": list(_RUN)},
    )


def _sweep() -> float:
    """Return the CPU seconds of the command and of all processes that it starts."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", *_RUN, f"seed=range(0,{JOBS})", "run_dir=sweep"]
        before = children_cpu()
        run_command(["-m", "scripts.train", *words], folder)
        return children_cpu() - before


def _reference() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        composing, fitting = run_command(["-c", _CALL], folder).splitlines()[-1].split()
    return float(composing), float(fitting)


def one_after_another() -> tuple[float, float]:
    """Compose, build and fit the runs in this process; return the CPU seconds of each part."""
    import_all(modules_of([compose(_RUN).config]))
    build = importlib.import_module("trainer.build.experiment").build
    composing = fitting = 0.0
    for number in range(JOBS):
        began = time.process_time()
        config = compose([*_RUN, f"seed={number}"]).config
        middle = time.process_time()
        trainer = build(config).trainer
        trainer.run_dir = Path(str(number))
        trainer.run_dir.mkdir()
        trainer.fit()
        composing += middle - began
        fitting += time.process_time() - middle
    return composing, fitting
