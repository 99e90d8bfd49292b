"""Where TensorBoard finds a run, and the command that shows it by its name."""

import shlex
from pathlib import Path

FOLDER = "tensorboard"
SESSIONS = Path("plugins", "profile")  # in FOLDER: where the Profile tab looks for traces
SWEEP = "sweep.json"  # in the folder of a sweep: what varies in it


def command(run_dir: Path) -> str:
    """Return the command that serves a run, under its own name, to this machine only.

    For a job of a sweep it is the sweep's, which shows the job by what varies in it.
    """
    in_sweep = (run_dir.parent / SWEEP).exists()
    return sweep_command(run_dir.parent if in_sweep else run_dir)


def sweep_command(folder: Path) -> str:
    """Return the command that serves a sweep, each job under what varies in it."""
    return f"regimen tensorboard --logdir {shlex.quote(str(folder))}"
