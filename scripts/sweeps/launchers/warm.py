"""What the fork server does once for all jobs: imports, a first composition, and versions."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from scripts.cli.deferred import defer_imports
from scripts.cli.shadow import PACKAGES
from scripts.composition.compose import compose
from scripts.composition.kept import keep_files
from trainer.runs.manifest import versions

# What every job imports. The modules of its targets come with the request (`modules_of`).
MODULES = (
    "scripts.train",
    "scripts.help",
    "scripts.runs.run",
    "torch.utils.serialization.config",
    "torch.utils._device",
    "torchvision.transforms.v2",
    "rich.console",
    "rich.table",
    "rich._emoji_codes",
)
_COMPILER = "torch._dynamo"  # seconds, and 100 MiB: without it every job that compiles takes them


def modules_of(configs: Iterable[dict[str, Any]]) -> list[str]:
    """Return the modules of ours that the targets of jobs are in, and the compiler if one compiles.

    A job imports other targets itself: what they do when imported is nobody else's.
    """
    found: dict[str, None] = {}
    for config in configs:
        found |= dict.fromkeys(_target_modules(config))
        if (config.get("trainer") or {}).get("compile"):
            found[_COMPILER] = None
    return list(found)


def _target_modules(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        module = str(node.get("_target_")).rpartition(".")[0]
        if module.partition(".")[0] in PACKAGES:
            yield module
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _target_modules(child)


def warm_up(modules: Iterable[str] = ()) -> None:
    """Import what jobs need, and compose the defaults, which loads Hydra's parser and plugins.

    None of it starts a thread.
    """
    import_all(modules)
    versions()
    keep_files()
    with suppress(Exception):
        compose([])


def import_all(modules: Iterable[str] = ()) -> None:
    """Import what every job needs, and further modules; a job reports an import that fails."""
    defer_imports()
    for name in (*MODULES, *modules):
        with suppress(ImportError):
            importlib.import_module(name)
