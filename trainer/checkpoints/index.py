"""`checkpoints/index.json`: step, metrics and sha256 of each checkpoint file."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from trainer.checkpoints.journal import INDEX, Content, read_content, write_content

__all__ = ["INDEX", "Entry", "Index", "finite", "layout_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint file: its step, metrics, size and digest."""

    file: str
    step: int
    size: int  # bytes
    sha256: str
    metrics: dict[str, float | None]  # None: not finite
    facts: dict[str, Any]  # torch, threads, device, world_size, when it was saved
    layout: str  # key of the names and shapes in Index.layouts


@dataclass(slots=True)
class Index:
    """The entries by file name, and the entries that the names `last`, `best`... refer to."""

    files: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, Entry] = field(default_factory=dict)
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)
    stored: Content = field(default_factory=dict, repr=False, compare=False)  # as on disk

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the index of `folder`: empty if missing, or damaged (with a warning)."""
        try:
            content = read_content(folder)
            files = {name: _entry(fields) for name, fields in content["files"].items()}
            names = {name: _entry(fields) for name, fields in content["names"].items()}
            return cls(files, names, dict(content["layouts"]), content)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged and is set up anew (%s)", folder / INDEX, error)
            return cls()

    def write(self, folder: Path) -> None:
        """Bring the index of `folder` up to date, durably; only its changes where it is large."""
        used = {entry.layout for entry in (*self.files.values(), *self.names.values())}
        content: Content = {
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            "names": {name: asdict(entry) for name, entry in sorted(self.names.items())},
            "layouts": {key: dict(shapes) for key, shapes in self.layouts.items() if key in used},
        }
        write_content(folder, content, self.stored)
        self.stored = content

    def add(self, entry: Entry, layout: Mapping[str, str]) -> Entry:
        """Add an entry; names and shapes of the weights are stored once for equal files."""
        text = json.dumps(list(layout.items()))
        entry = replace(entry, layout=hashlib.sha256(text.encode()).hexdigest()[:16])
        self.layouts[entry.layout] = dict(layout)
        self.files[entry.file] = entry
        return entry

    def existing(self, folder: Path) -> list[Entry]:
        """Return the entries whose file exists with the recorded size, sorted by step."""
        whole = [entry for entry in self.files.values() if _size(folder / entry.file) == entry.size]
        return sorted(whole, key=lambda entry: entry.step)


def layout_of(model: Mapping[str, Any]) -> dict[str, str]:
    """Return each tensor's dtype and shape by name, as in `float32[64, 3, 3, 3]`."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in model.items()
        if isinstance(value, torch.Tensor)
    }


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace values that JSON cannot represent (NaN, infinity) by None."""
    return {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}


def _entry(fields: dict[str, Any]) -> Entry:
    return Entry(**fields)


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
