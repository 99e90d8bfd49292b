"""The loop, its moments, what a step computes; a room for each group of the configuration."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `Trainer`, imported when it is asked for: `regimen.trainer.files` needs no torch."""
    if name == "Trainer":
        from regimen.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'regimen.trainer' has no attribute {name!r}")
