"""The settings of a run, as the files of its directory have them, and what varies in its sweep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.files.own_yaml import own_values
from trainer.runs.dashboard import SWEEP

Value = bool | int | float | str


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


def read_overrides(path: Path) -> dict[str, str]:
    """Return the overrides of a run as written, by key."""
    try:
        texts = own_values(path.read_text(encoding="utf-8"))
        pairs = (str(text).lstrip("+~").partition("=") for text in texts)
        return {key: value for key, _, value in pairs}
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
