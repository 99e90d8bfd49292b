"""`checkpoints/index.json`: step, metrics and sha256 of each checkpoint file."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from trainer.checkpoints.journal import INDEX, Change, Content, read_content, write_content

__all__ = ["INDEX", "Entry", "Index", "finite", "layout_of"]

_log = logging.getLogger(__name__)

Sections = dict[str, dict[str, Any]]  # by name: entries, and names and shapes of weights


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
    stored: Sections = field(default_factory=dict, repr=False, compare=False)  # as on disk

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the index of `folder`: empty if missing, or damaged (with a warning)."""
        try:
            content = read_content(folder)
            files = {name: _entry(fields) for name, fields in content["files"].items()}
            names = {name: _entry(fields) for name, fields in content["names"].items()}
            index = cls(files, names, dict(content["layouts"]))
            index.stored = index._sections()
            return index
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged and is set up anew (%s)", folder / INDEX, error)
            return cls()

    def write(self, folder: Path) -> None:
        """Bring the index of `folder` up to date, durably; only its changes where it is large."""
        sections = self._sections()
        changes = list(_changes(self.stored, sections))
        write_content(folder, changes, lambda: _plain(sections), known=bool(self.stored))
        self.stored = sections

    def _sections(self) -> Sections:
        used = {entry.layout for entry in (*self.files.values(), *self.names.values())}
        layouts = {key: shapes for key, shapes in self.layouts.items() if key in used}
        return {"files": dict(self.files), "names": dict(self.names), "layouts": layouts}

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


def _changes(before: Sections, after: Sections) -> Iterator[Change]:
    for section, values in after.items():
        old = before.get(section, {})
        for name in {**old, **values}:
            if old.get(name) != values.get(name):
                yield section, name, _fields(values.get(name))


def _plain(sections: Sections) -> Content:
    return {
        section: {name: _fields(value) for name, value in sorted(values.items())}
        for section, values in sections.items()
    }


def _fields(value: Any) -> Any:
    return asdict(value) if isinstance(value, Entry) else value


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
