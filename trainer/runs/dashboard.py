"""Where TensorBoard finds a run, and the command that shows it."""

import shlex
from pathlib import Path

FOLDER = "tensorboard"
SESSIONS = Path("plugins", "profile")  # in FOLDER: where the Profile tab looks for traces
SWEEP = "sweep.json"  # in the folder of a sweep: what varies in it


def command(run_dir: Path) -> str:
    """Return the command that serves a run to this machine only.

    For a job of a sweep it is the sweep's, which shows the job by what varies in it.
    """
    folder = run_dir.parent if (run_dir.parent / SWEEP).exists() else run_dir
    return f"tensorboard --logdir {shlex.quote(str(folder / FOLDER))}"
