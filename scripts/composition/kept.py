"""Merged files, kept for further compositions with the same choices: a fifth of the time.

A process that composes the jobs of a sweep keeps them; a lone command composes once.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.yaml_file import Document
from scripts.cli.arguments import Arguments
from scripts.composition.origins import Placed

_Key = tuple[Arguments, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Merged:
    """What the files that a command line chooses hold together, before its values are set."""

    tree: DictConfig
    choices: dict[str, Any]  # the choice for each group
    files: list[Placed]
    documents: dict[Path, Document]


@dataclass(slots=True)
class _Shelf:
    merged: dict[_Key, bytes] = field(default_factory=dict)
    users: int = 0


_shelf = _Shelf()


def keep_files() -> None:
    """Keep files from here on, in this process: a later change of a file is not noticed."""
    _shelf.users += 1


@contextmanager
def keeping_files() -> Iterator[None]:
    """Keep files as long as the context lasts."""
    keep_files()
    try:
        yield
    finally:
        _shelf.users -= 1
        if not _shelf.users:
            _shelf.merged.clear()


def recall(arguments: Arguments, choices: list[str]) -> Merged | None:
    """Return a copy of what was merged for these choices; None if nothing was."""
    found = _shelf.merged.get(_key(arguments, choices))
    return None if found is None else pickle.loads(found)


def keep(arguments: Arguments, choices: list[str], merged: Merged) -> None:
    """Keep what was merged, if files are kept."""
    if _shelf.users:
        # A copy in this form is made in a quarter of the time of a deep copy.
        _shelf.merged[_key(arguments, choices)] = pickle.dumps(merged)


def _key(arguments: Arguments, choices: list[str]) -> _Key:
    return replace(arguments, overrides=(), multirun=False), tuple(choices)
