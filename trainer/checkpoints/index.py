"""`checkpoints/index.json`: step, metrics and sha256 of each checkpoint file."""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from trainer.files.atomic import regular, write_json

INDEX = "index.json"
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


@dataclass(slots=True)
class Index:
    """The entries by file name, and those that the names `last`, `best` refer to."""

    files: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, Entry] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)  # of the weights: float32[64, 3, 3, 3]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the index of `folder`: empty if missing, or damaged (with a warning)."""
        try:
            content = json.loads(regular(folder / INDEX).read_text(encoding="utf-8"))
            files, names = (
                {name: Entry(**fields) for name, fields in content[key].items()}
                for key in ("files", "names")
            )
            return cls(files, names, dict(content["layout"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged and is set up anew (%s)", folder / INDEX, error)
            return cls()

    def write(self, folder: Path) -> None:
        """Replace the index of `folder`, durably. Raises StorageError."""
        write_json(folder / INDEX, asdict(self))

    def digests(self, path: Path) -> set[str] | None:
        """Return the digests that a file may have; None where the index does not tell."""
        if path.name in self.files:
            return {self.files[path.name].sha256}
        # A name may already lead to a checkpoint that the index, written last, does not list yet.
        listed = all(other.name in self.files for other in path.parent.glob("step-*.pt"))
        if path.stem not in self.names or not listed:
            return None
        return {entry.sha256 for entry in (*self.files.values(), *self.names.values())}
