"""Where TensorBoard finds a run, and the command that shows it by its name."""

import shlex
from pathlib import Path

FOLDER = "tensorboard"
SWEEP = "sweep.json"  # in the folder of a sweep: what varies in it


def command(run_dir: Path) -> str:
    """Return the command that serves a run, under its own name, to this machine only.

    For a job of a sweep it is the sweep's, which shows the job by what varies in it.
    """
    if (run_dir.parent / SWEEP).exists():
        return sweep_command(run_dir.parent)
    name, folder = "/".join(run_dir.parts[-2:]).lstrip("/"), run_dir / FOLDER
    if any(sign in f"{name}{folder}" for sign in ":,"):  # these separate runs and their names
        return _served("--logdir", str(run_dir))
    return _served("--logdir_spec", f"{name}:{folder}")


def sweep_command(folder: Path) -> str:
    """Return the command that serves a sweep, each job under what varies in it."""
    return _served("--logdir", str(folder / FOLDER))


def _served(option: str, value: str) -> str:
    return f"tensorboard {option} {shlex.quote(value)} --host 127.0.0.1"
