"""The loop, its moments, what a step computes; a room for each group of the configuration."""

from typing import Any

from regimen.trainer.shadow import refuse_shadows

refuse_shadows()


def __getattr__(name: str) -> Any:
    """Return `load_run`, imported when it is asked for: `trainer.files` needs no torch."""
    if name == "load_run":
        from regimen.trainer.inference.run import load_run

        return load_run
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
