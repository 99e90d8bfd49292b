"""The tree that files and overrides are merged into, and where each of its keys was written."""

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from regimen.conf.check import format_value, unknown
from regimen.conf.errors import Problem
from regimen.conf.fields import declared
from regimen.conf.interpolation import Interpolations, above, children, join, walk
from regimen.conf.schema import OWN_KEYS, DataConfig, TransformsConfig, Values
from regimen.trainer.targets.instantiate import SPECIAL, accepts_argument

# Sections that may contain the user's own keys, read by interpolations.
_OPEN = {"data": DataConfig, "transforms": TransformsConfig}
# Keys of the schema that data sets, too, read by interpolations: alone they do less, or nothing.
_SHARED = ("root", "cache_dir", "num_classes")
_SPLITS = ("train", "val", "test", "predict")
_OF_DATA = re.compile(r"data\.").match
_TAKING = ("model.", "data.", "transforms.")  # sections whose arguments read them


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


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice in a group that replaces an earlier one."""

    key: str  # of the group, with dots
    is_empty: bool
    place: int  # of the file that makes it among all of them; their number: typed


class Tree:
    """Merged values with their interpolations, and the source that set each key last."""

    def __init__(self) -> None:
        self.values = Values()
        self.sources = dict[str, Source]()
        self.declared = set[str]()  # keys that a group's file has
        self._primary = Values()  # of the open sections in the primary file, with their values
        self.problems = list[Problem]()
        self._replaced = dict[str, set[Source]]()  # by node: of earlier targets

    def merge(
        self,
        content: Mapping[str, Any],
        source: Source,
        primary: bool = False,
        later: Sequence[Choice] = (),
    ) -> None:
        """Merge what a file holds, or an override sets; lists and values replace what is there.

        `later`: choices in groups by a later word than the file's.
        """
        for part in reversed(source.package.split(".") if source.package else ()):
            content = {part: content}
        for choice in later:
            if not _is_below(source.package, choice.key):  # a file of the group itself
                content = _without(content, choice, choice.key.split("."))
        for section in _OPEN if primary else _OPEN.keys() & {source.package}:
            self.declared |= {key for key, _ in children(content.get(section), section)}
            if primary:
                self._primary |= copy.deepcopy(dict(children(content.get(section), section)))
        self._merge(self.values, content, "", source)

    def _merge(self, old: Values, new: Mapping[str, Any], key: str, source: Source) -> None:
        if {"_target_"} <= old.keys() & new.keys() and old["_target_"] != new["_target_"]:
            self._replaced.setdefault(key, set()).add(self.sources[join(key, "_target_")])
        for name, value in new.items():
            here, before = join(key, name), old.get(name)
            if value == "???" and name in old:
                continue
            if isinstance(value, dict) and isinstance(before, list):
                for number, item in value.items():
                    if str(number).isdecimal() and int(number) < len(before):
                        before[int(number)] = item
                    else:
                        message = f"{here} is a list of {len(before)}, counted from 0"
                        self.problems.append(Problem(join(here, number), message))
            elif isinstance(value, list) and isinstance(before, dict):
                message = f"expected a section of keys, got {format_value(value)}"
                self.problems.append(Problem(here, message))
            elif isinstance(value, dict):
                if not isinstance(before, dict):
                    before = old[name] = {}
                self._merge(before, value, here, source)
            else:
                if isinstance(before, dict | list):
                    self.sources = {k: s for k, s in self.sources.items() if not _is_below(k, here)}
                old[name] = copy.deepcopy(value)
            self.sources[here] = source

    def node(self, key: str) -> Any:
        """Return what stands at a key; None if it is not there."""
        return dict(walk(self.values)).get(key)

    def delete(self, key: str, value: Any, source: Source) -> str | None:
        """Delete a key; return why that cannot be, if it cannot. `value`: None, or what it has."""
        section, _, name = key.rpartition(".")
        node = self.node(section)
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
        splits of its data set are dropped, and the number of its classes.
        """
        for key, earlier in self._replaced.items():
            node = self.node(key)
            if not isinstance(node, dict) or "_target_" not in node:
                continue
            last = self.sources[join(key, "_target_")]
            own = {*SPECIAL, *(n for part in key.split(".") for n in OWN_KEYS.get(part, ()))}
            for name in [name for name in node if name not in own]:
                where = join(key, name)
                old = all(
                    s in earlier or (s is not last and _is_below(s.package, key))
                    for s in self._below(where)
                )
                if old and where not in chosen and not accepts_argument(node, str(name)):
                    del node[name]
        for split in ("val", "test", "predict") if "data.train" in self._replaced else ():
            if set(self._below(f"data.{split}")) <= self._replaced["data.train"]:
                self.values["data"][split] = None
        of_train = self._replaced.get("data.train", set())
        if (
            set(self._below("data.num_classes")) <= of_train
            and "num_classes" in self.values["data"]
        ):
            self.values["data"]["num_classes"] = None
        for split in ("val", "test"):
            one = self.node(f"data.{split}")
            if not isinstance(one, dict) or "_target_" not in one:
                continue
            # It is of a group; sets by name replace it.
            named = {n: v for n, v in one.items() if isinstance(v, dict) and "_target_" in v}
            if named and not any(map(partial(accepts_argument, one), named)):
                self.values["data"][split] = named

    def _below(self, key: str) -> list[Source]:
        return [s for k, s in self.sources.items() if _is_below(k, key)]

    def unread(self, followed: Interpolations) -> Iterator[Problem]:
        """Yield the keys of open sections that no file of the group has and nothing reads."""
        for section, schema in _OPEN.items():
            given = self.node(section)
            names = list(map(str, given)) if isinstance(given, dict) else []
            known = [*declared(schema), *(n for n in names if join(section, n) in self.declared)]
            for name in [name for name in names if name not in known]:
                key = join(section, name)
                if not _is_read(key, followed):
                    yield unknown(section, name, known)
        yield from self._idle(followed)

    def _idle(self, followed: Interpolations) -> Iterator[Problem]:
        """Yield the typed keys that feed nothing: a run's configuration is stored resolved."""
        for key, before in self._primary.items():
            section, _, name = key.partition(".")
            if before == self.node(key) or not self._is_typed(key) or _is_read(key, followed):
                continue
            if name in declared(_OPEN[section]) and name not in _SHARED:
                continue
            alike, others = self._holders(name, before)
            if name in _SHARED[1:] and not alike:  # such a key has an effect of its own
                continue
            if not any(map(_OF_DATA, alike)):  # data sets ignore it
                alike += others
            told = "=..., ".join([*alike, ""]).rstrip(", ") or "no key takes its value from it"
            yield Problem(key, f"feeds nothing in this run: {told}")

    def _holders(self, name: str, value: Any) -> tuple[list[str], list[str]]:
        """Return the arguments that hold a value: those of its name, and others.

        They are those that were not typed; those of data.test come before those of data.train.
        """
        alike = list[str]()
        others = list[str]()
        for key, held in reversed(list(walk(self.values))):
            if value is None or held != value or not key.startswith(_TAKING):
                continue
            if key in self._primary or self._is_typed(key):
                continue
            if key.endswith(f".{name}"):
                alike.append(key)
            else:
                others.append(key)
        return alike, others

    def _is_typed(self, key: str) -> bool:
        return any(source.package is None for source in self._below(key))

    def of(self, key: str) -> str | None:
        """Return where a key was last set: the command line, or file:line; None if not at all."""
        if typed := [source for source in self._below(key) if source.package is None]:
            return typed[-1].shown
        key = above(key, self.sources)
        return self.sources[key].at(key) if key else None


def _is_read(key: str, followed: Interpolations) -> bool:
    """Return whether an interpolation refers to a key, or to what is above or below it."""
    return any(_is_below(key, at) or _is_below(at, key) for at in followed.read)


def _without(content: Mapping[str, Any], choice: Choice, path: Sequence[str]) -> Values:
    """Return a file's content without what a choice of a later word replaces at a path.

    That is a null or a whole node in the place of the group; where nothing was chosen, values too;
    and the data sets of a choice of data.
    """
    name, *rest = path
    child = content.get(name)
    if rest and isinstance(child, dict):
        return {**content, name: _without(child, choice, rest)}
    is_node = isinstance(child, dict) and "_target_" in child
    if not rest and (choice.is_empty or child is None or is_node):
        kept = dict(content)
        kept.pop(name, None)
        return kept
    if choice.key == "data" and isinstance(child, dict):
        return {**content, name: _without_sets(child)}
    return dict(content)


def _without_sets(data: Mapping[str, Any]) -> Values:
    """Return a file's data without its whole data sets; what it sets of others stays.

    With a training set go all splits, also those that are null beside it.
    """
    if _is_set(data.get("train")):
        return {name: value for name, value in data.items() if name not in _SPLITS}
    return {n: value for n, value in data.items() if n not in _SPLITS or not _is_set(value)}


def _is_set(value: Any) -> bool:
    """Return whether a split is described as a whole: by one node, or by several by name."""
    if not isinstance(value, dict) or not value:
        return False
    if "_target_" in value:
        return True
    return all(isinstance(one, dict) and "_target_" in one for one in value.values())


def _is_below(key: str | None, other: str) -> bool:
    return key is not None and f"{key}.".startswith(f"{other}.")


def shown_path(path: Path) -> str:
    """Return a path for a message: relative if that is shorter."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):
        return str(path)
    return str(path) if relative.startswith("..") else relative
