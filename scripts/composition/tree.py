"""The tree that files and overrides are merged into, and where each of its keys was written."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.check import shown, unknown
from conf.errors import Problem
from conf.fields import declared
from conf.interpolation import Interpolations, join
from conf.schema import OWN_KEYS, DataConfig, TransformsConfig
from trainer.targets.signatures import SPECIAL, takes

# Sections that may contain the user's own keys, read by interpolations.
_OPEN = {"data": DataConfig, "transforms": TransformsConfig}


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A file, and the key below which its content is merged; or an override, as typed."""

    shown: str
    package: str | None = None  # None: typed
    lines: Mapping[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Return where a key of the tree is written here."""
        line = self.lines.get(key.removeprefix(f"{self.package}.") if self.package else key)
        return f"{self.shown}:{line}" if line else self.shown


@dataclass(slots=True)
class Tree:
    """Merged values with their interpolations, and the source that set each key last."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)  # keys that a group's file has
    problems: list[Problem] = field(default_factory=list)
    _replaced: dict[str, set[Source]] = field(default_factory=dict)  # by node: of earlier targets

    def merge(self, content: Mapping[str, Any], source: Source, primary: bool = False) -> None:
        """Merge what a file holds, or an override sets; lists and values replace what is there."""
        if source.package in _OPEN:
            self.declared |= {join(source.package, name) for name in content}
        elif primary:
            inside = ((s, content[s]) for s in _OPEN if isinstance(content.get(s), dict))
            self.declared |= {join(section, name) for section, names in inside for name in names}
        for part in reversed(source.package.split(".") if source.package else ()):
            content = {part: content}
        self._merge(self.values, content, "", source)

    def _merge(self, old: dict[str, Any], new: Mapping[str, Any], key: str, source: Source) -> None:
        if {"_target_"} <= old.keys() & new.keys() and old["_target_"] != new["_target_"]:
            self._replaced.setdefault(key, set()).add(self.sources[f"{key}._target_"])
        for name, value in new.items():
            here = join(key, name)
            if value == "???" and name in old:
                continue
            if isinstance(value, dict):
                if isinstance(items := old.get(name), list):
                    self._set_items(items, value, here)
                    self.sources[here] = source
                    continue
                if not isinstance(old.get(name), dict):
                    self._forget(here, old.get(name))
                    old[name] = {}
                self._merge(old[name], value, here, source)
            elif isinstance(value, list) and isinstance(old.get(name), dict):
                message = f"expected a section of keys, got {shown(value)}"
                self.problems.append(Problem(here, message))
            else:
                self._forget(here, old.get(name))
                old[name] = copy.deepcopy(value)  # files are read once for all jobs of a sweep
            self.sources[here] = source

    def _forget(self, key: str, value: Any) -> None:
        if isinstance(value, dict | list):
            self.sources = {k: s for k, s in self.sources.items() if not k.startswith(f"{key}.")}

    def _set_items(self, items: list[Any], new: Mapping[str, Any], key: str) -> None:
        for number, value in new.items():
            if str(number).isdecimal() and int(number) < len(items):
                items[int(number)] = value
            else:
                message = f"{key} is a list of {len(items)}, counted from 0"
                self.problems.append(Problem(join(key, number), message))

    def delete(self, key: str, value: Any, source: Source) -> str | None:
        """Delete a key; return why that cannot be, if it cannot. `value`: None, or what it has."""
        *sections, name = key.split(".")
        node: Any = self.values
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            return "cannot be deleted: it does not exist"
        if value is not None and value != node[name]:
            return f"cannot be deleted: it is {node[name]}, not {value}"
        del node[name]
        self.sources[key] = source
        return None

    def drop_leftovers(self, chosen: Collection[str]) -> None:
        """Drop what came with a `_target_` that was replaced and that the new one does not take.

        What was given elsewhere, or `chosen` in a group, is kept. With the training set the other
        splits of its data set are dropped.
        """
        for key, earlier in self._replaced.items():
            node: Any = self.values
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if not isinstance(node, dict) or "_target_" not in node:
                continue
            last = self.sources[f"{key}._target_"]
            own = {*SPECIAL, *(n for part in key.split(".") for n in OWN_KEYS.get(part, ()))}
            for name in [name for name in node if name not in own]:
                where = join(key, name)
                old = all(
                    s in earlier or (s is not last and _is_below(s.package, key))
                    for s in self._sources_below(where)
                )
                if old and where not in chosen and not _takes(node["_target_"], str(name)):
                    del node[name]
        for split in ("val", "test", "predict") if "data.train" in self._replaced else ():
            if set(self._sources_below(f"data.{split}")) <= self._replaced["data.train"]:
                self.values["data"][split] = None

    def _sources_below(self, key: str) -> Iterator[Source]:
        return (s for k, s in self.sources.items() if k == key or k.startswith(f"{key}."))

    def unread(self, followed: Interpolations) -> Iterator[Problem]:
        """Yield the keys of open sections that no file of the group has and nothing reads."""
        for section, schema in _OPEN.items():
            given = self.values.get(section)
            given = given if isinstance(given, dict) else {}
            extra = [str(name) for name in given if name not in declared(schema)]
            known = [*declared(schema), *(n for n in extra if join(section, n) in self.declared)]
            for name in (name for name in extra if name not in known):
                key = join(section, name)
                if not any(
                    _is_below(key, other) or _is_below(other, key) for other in followed.read
                ):
                    yield unknown(section, name, known)

    def of(self, key: str) -> str | None:
        """Return where a key was last set: the command line, or file:line; None if not at all."""
        typed = [s for s in self._sources_below(key) if s.package is None]
        if typed:
            return typed[-1].shown
        while key and key not in self.sources:
            key = key.rpartition(".")[0]
        return self.sources[key].at(key) if key else None


def _is_below(key: str | None, other: str) -> bool:
    return key is not None and f"{key}.".startswith(f"{other}.")


def _takes(target: Any, name: str) -> bool:
    try:
        return takes({"_target_": target}, name)
    except Exception:  # of a module of the user's: the check of targets tells it
        return True


def shown_path(path: Path) -> str:
    """Return a path for a message: relative if that is shorter."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):
        return str(path)
    return str(path) if relative.startswith("..") else relative
