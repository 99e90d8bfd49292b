"""From `sweep.launcher` to the launcher."""

from conf.schema import SweepConfig
from scripts.sweeps.launchers.launcher import Launcher
from scripts.sweeps.launchers.local import LocalLauncher
from scripts.sweeps.launchers.ray_tasks import RayLauncher
from scripts.sweeps.launchers.server import Server
from scripts.sweeps.launchers.slurm import SubmititLauncher

LAUNCHERS = ("local", "submitit", "ray")


def launcher_for(settings: SweepConfig, server: Server) -> Launcher:
    """Return the launcher of `sweep.launcher`. Raises ConfigError if its package is missing."""
    if settings.launcher == "submitit":
        return SubmititLauncher(settings.launcher_options)
    if settings.launcher == "ray":
        return RayLauncher(settings.launcher_options)
    return LocalLauncher(server, settings.jobs or 1, settings.jobs_per_device)
