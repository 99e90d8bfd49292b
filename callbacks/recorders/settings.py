"""The settings of a run, as the files of its directory have them, and how it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.runs.directory import CONFIG, OVERRIDES
from trainer.runs.status import SWEEP, own_values

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Names:
    """How a run is called in a tracker, and its configuration."""

    project: str  # the configuration's `name`
    run: str  # its folder, or what varies in a job of a sweep
    sweep: str | None  # the same for all jobs of one
    config: Mapping[str, Any]

    @classmethod
    def of(cls, run: Path, config_text: str) -> Names:
        """Return the names of the run in a directory; its configuration is there or `text`."""
        file = run / CONFIG
        text = file.read_text(encoding="utf-8") if file.exists() else config_text
        config = own_values(text) or {}
        project = str(config.get("name") or run.parent.name)
        if not (swept := swept_keys(run)):
            return cls(project, run.name, None, config)
        values = read_overrides(run)
        pairs = [f"{key.rpartition('.')[2]}={values[key]}" for key in swept if key in values]
        return cls(project, ",".join(pairs) or run.name, f"{project}/{run.parent.name}", config)


def swept_keys(run: Path) -> list[str]:
    """Return what varies in the sweep that a run is a job of; nothing if it is of none."""
    try:
        keys = json.loads((run.parent / SWEEP).read_text(encoding="utf-8"))["swept"]
        return [str(key) for key in keys]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Value | None]]:
    """Yield the values of a nested mapping by their dotted keys; a list is one text."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(node) if isinstance(node, list) else node


def read_overrides(run: Path) -> dict[str, str]:
    """Return the overrides of a run as written, by key."""
    try:
        texts = own_values((run / OVERRIDES).read_text(encoding="utf-8"))
        pairs = (str(text).lstrip("+~").partition("=") for text in texts)
        return {key: value for key, _, value in pairs}
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
