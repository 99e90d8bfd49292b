"""Present import paths of targets in configurations and checkpoints of version 0.1."""

from typing import Any

# Old module -> new module, for all that a `_target_` could name.
RENAMED = {
    "data.views": "data.transforms",
    "trainer.confusion": "trainer.tasks.metrics",
    "trainer.losses": "trainer.tasks.losses",
    "trainer.muon": "trainer.optimizers.muon",
    "trainer.penalties": "trainer.tasks.penalties",
    "trainer.running": "trainer.tasks.metrics",
}


def present_path(path: str) -> str:
    """Return the present import path for `path`."""
    module, dot, name = path.rpartition(".")
    return f"{RENAMED.get(module, module)}{dot}{name}"


def with_present_targets(tree: Any) -> Any:
    """Return nested containers in which each `_target_` is its present path."""
    if isinstance(tree, dict):
        return {
            key: present_path(value)
            if key == "_target_" and isinstance(value, str)
            else with_present_targets(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [with_present_targets(value) for value in tree]
    return tree
