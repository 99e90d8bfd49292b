"""From a configuration to objects, in reading order; only this room sees `conf` and `data`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `build`, imported when it is asked for."""
    if name == "build":
        from regimen.trainer.assembly.experiment import build

        return build
    raise AttributeError(f"module 'trainer.assembly' has no attribute {name!r}")
