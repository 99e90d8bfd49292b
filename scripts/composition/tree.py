"""The tree that files and overrides are merged into, with the place where each key was written."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regimen.conf.check import format_value, unknown
from regimen.conf.errors import Problem
from regimen.conf.fields import declared
from regimen.conf.interpolation import (
    Interpolations,
    above,
    children,
    is_below,
    is_related,
    join,
    walk,
)
from regimen.conf.schema import OWN_KEYS, DataConfig, TransformsConfig, Values
from regimen.trainer.targets.instantiate import SPECIAL, accepts_argument

# Sections that may contain the user's own keys, for interpolations to read.
_OPEN = {"data": DataConfig, "transforms": TransformsConfig}
# Keys of the schema that the data sets of a file read by interpolations. Where no data set reads
# them, the first has no effect, and the others have less.
_READ_BY_DATA = ("root", "cache_dir", "num_classes")
_SPLITS = ("train", "val", "test", "predict")
_READERS = ("model.", "data.", "transforms.")  # sections whose arguments read the user's own keys
# Sections of nodes by name, and the groups that choose which nodes there are.
_NAMED = {
    "callbacks": ("callbacks",),
    "transforms.train": ("transforms", "data"),
    "transforms.eval": ("transforms", "data"),
    "transforms.device": ("transforms", "data"),
}


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A file, with the key below which its content is merged; or an override, as typed."""

    shown: str
    package: str | None = None  # None: typed
    lines: Mapping[str, int] = field(default_factory=dict)

    def location(self, key: str) -> str:
        """Return where a key of the tree is written: `file:line`, or the override."""
        if self.package:
            key = key.removeprefix(f"{self.package}.")
        line = self.lines.get(key)
        return f"{self.shown}:{line}" if line else self.shown


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice in a group that replaces an earlier one."""

    key: str  # of the group, with dots
    is_empty: bool
    is_added: bool  # `+group=x` leaves out no earlier choice
    file: str | None  # that makes the choice; None: it is typed
    place: int  # of this file among all; their number if it is typed


class Tree:
    """Merged values with their interpolations, and the source that set each key last."""

    def __init__(self) -> None:
        self.values = Values()
        self.sources = dict[str, Source]()
        self.declared = set[str]()  # keys in the files of the groups of open sections
        self.problems = list[Problem]()
        self._primary = Values()  # keys and values of the open sections in the primary file
        self._shared = dict[str, str]()  # arguments of data sets that `data.shared` holds: its key
        self._replaced_targets = dict[str, set[Source]]()  # by node: the sources of earlier targets
        # By group: the files before a choice that leaves out what they may set keys of.
        self._files_before_choice = dict[str, set[Source]]()

    def merge(
        self,
        content: Mapping[str, Any],
        source: Source,
        primary: bool = False,
        later: Sequence[Choice] = (),
    ) -> None:
        """Merge the content of a file or an override; lists and values replace what is there.

        `later`: choices in groups that are made after the file's.
        """
        if source.package:
            for part in reversed(source.package.split(".")):
                content = {part: content}
        for choice in later:
            if not is_below(source.package, choice.key):  # a file of the group itself
                content = _without(content, choice, choice.key.split("."))
                if not choice.is_added:
                    self._files_before_choice.setdefault(choice.key, set()).add(source)
        for section in _OPEN:
            if primary or section == source.package:
                keys = dict(children(content.get(section), section))
                self.declared |= keys.keys()
                if primary:
                    self._primary |= copy.deepcopy(keys)
        self._merge(self.values, content, "", source)

    def _merge(self, old: Values, new: Mapping[str, Any], section: str, source: Source) -> None:
        if "_target_" in old and "_target_" in new and old["_target_"] != new["_target_"]:
            earlier = self.sources[join(section, "_target_")]
            self._replaced_targets.setdefault(section, set()).add(earlier)
        for name, value in new.items():
            if value == "???" and name in old:
                continue
            key = join(section, name)
            before = old.get(name)
            if isinstance(value, dict) and isinstance(before, list):
                self._merge_into_list(before, value, key)
            elif isinstance(value, list) and isinstance(before, dict):
                self.problems.append(
                    Problem(key, f"expected a section of keys, got {format_value(value)}")
                )
            elif isinstance(value, dict):
                if not isinstance(before, dict):
                    before = old[name] = {}
                self._merge(before, value, key, source)
            else:
                if isinstance(before, dict | list):  # everything in it is gone
                    self.sources = {k: s for k, s in self.sources.items() if not is_below(k, key)}
                old[name] = copy.deepcopy(value)
            self.sources[key] = source

    def _merge_into_list(self, items: list[Any], new: Mapping[Any, Any], key: str) -> None:
        """Replace items of a list by their numbers (`widths.1=99`)."""
        for number, item in new.items():
            if str(number).isdecimal() and int(number) < len(items):
                items[int(number)] = item
            else:
                self.problems.append(
                    Problem(join(key, number), f"{key} is a list of {len(items)}, counted from 0")
                )

    def node(self, key: str) -> Any:
        """Return the value at a key; None if there is none."""
        return dict(walk(self.values)).get(key)

    def delete(self, key: str, value: Any, source: Source) -> str | None:
        """Delete a key; return why it cannot be deleted, if it cannot.

        `value`: the value that it must have; None for any.
        """
        section, _, name = key.rpartition(".")
        node = self.node(section)
        if not isinstance(node, dict) or name not in node:
            return "cannot be deleted: it does not exist"
        if value is not None and value != node[name]:
            return f"cannot be deleted: it is {node[name]}, not {value}"
        del node[name]
        self.sources[key] = source
        return None

    def drop_leftovers(self, chosen: Collection[str], are_transforms_of_data: bool) -> None:
        """Drop the arguments of a replaced `_target_` that the new target does not take.

        Arguments that another source gave, or that were `chosen` in a group, are kept. With the
        training set, the other splits of its data set and the number of its classes are dropped;
        if a file replaces it, so are the transforms that came with the data
        (`are_transforms_of_data`). So are values for a callback or a transform in a file, where a
        later choice leaves that one out.
        """
        for key, earlier in self._replaced_targets.items():
            node = self.node(key)
            if isinstance(node, dict) and "_target_" in node:
                self._drop_arguments(node, key, earlier, chosen)
        if "data.train" in self._replaced_targets:
            replaced = self._replaced_targets["data.train"]
            for name in ("val", "test", "predict", "num_classes"):
                if replaced.issuperset(self._sources_below(f"data.{name}")):
                    self.values["data"][name] = None
            if are_transforms_of_data and not self._is_typed("data.train._target_"):
                self._drop_transforms_of_group()
        self._drop_values_of_left_out_nodes()
        for split in ("val", "test"):
            self._replace_by_named_sets(split)

    def _drop_transforms_of_group(self) -> None:
        for section in ("transforms.train", "transforms.eval", "transforms.device"):
            for name in self._named_nodes(section):
                sources = self._sources_below(join(section, name))
                if all(source.package == "transforms" for source in sources):
                    del self.node(section)[name]

    def _drop_values_of_left_out_nodes(self) -> None:
        for section, groups in _NAMED.items():
            files = set[Source]()
            for group in groups:
                files |= self._files_before_choice.get(group, set())
            for name, node in self._named_nodes(section).items():
                sources = self._sources_below(join(section, name))
                if "_target_" not in node and files.issuperset(sources):
                    del self.node(section)[name]

    def _named_nodes(self, section: str) -> Values:
        nodes = self.node(section)
        if not isinstance(nodes, dict):
            return {}
        return {name: node for name, node in nodes.items() if _is_section(node)}

    def _drop_arguments(
        self, node: Values, key: str, earlier: set[Source], chosen: Collection[str]
    ) -> None:
        """Drop the arguments of a node that came with an earlier target, from `earlier` sources."""
        last = self.sources[join(key, "_target_")]
        own_keys = set(SPECIAL)
        for part in key.split("."):
            own_keys.update(OWN_KEYS.get(part, ()))
        for name in list(node):
            argument = join(key, name)
            if name in own_keys or argument in chosen:
                continue
            came_with_target = all(
                source in earlier or (source is not last and is_below(source.package, key))
                for source in self._sources_below(argument)
            )
            if came_with_target and not accepts_argument(node, str(name)):
                del node[name]

    def share_arguments(self) -> None:
        """Give each data set the arguments of `data.shared` that it has not itself."""
        data = self.values.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("shared"), dict):
            return
        shared = data.pop("shared")
        for split in _SPLITS:
            for key, node in _data_sets(data.get(split), f"data.{split}"):
                for name, value in shared.items():
                    if name not in node:
                        node[name] = copy.deepcopy(value)
                        self._shared[join(key, name)] = f"data.shared.{name}"

    def _replace_by_named_sets(self, split: str) -> None:
        """Let data sets by name, merged into the data set of a group, take its place."""
        node = self.node(f"data.{split}")
        if not isinstance(node, dict) or "_target_" not in node:
            return
        named = {name: value for name, value in node.items() if _is_node(value)}
        if named and not any(accepts_argument(node, name) for name in named):
            self.values["data"][split] = named

    def _sources_below(self, key: str) -> list[Source]:
        return [source for place, source in self.sources.items() if is_below(place, key)]

    def unused_keys(self, interpolations: Interpolations) -> Iterator[Problem]:
        """Yield the keys of open sections that no file of the group has and nothing reads."""
        for section, schema in _OPEN.items():
            node = self.node(section)
            if not isinstance(node, dict):
                continue
            names = list(map(str, node))
            known = list(declared(schema))
            known += [name for name in names if join(section, name) in self.declared]
            for name in names:
                if name not in known and not is_related(join(section, name), interpolations.read):
                    yield unknown(section, name, known)
        yield from self._ineffective_keys(interpolations)

    def _ineffective_keys(self, interpolations: Interpolations) -> Iterator[Problem]:
        """Yield the typed keys that feed nothing.

        The configuration of a run is stored resolved: nothing in it reads the keys of `data`.
        """
        for key, before in self._primary.items():
            is_changed = before != self.node(key) and self._is_typed(key)
            if not is_changed or is_related(key, interpolations.read):
                continue
            section, _, name = key.partition(".")
            if name in declared(_OPEN[section]) and name not in _READ_BY_DATA:
                continue
            holders, others = self._holders(name, before)
            if name in ("cache_dir", "num_classes") and not holders:
                continue  # such a key has an effect of its own
            if not any(holder.startswith("data.") for holder in holders):  # data sets ignore it
                holders += others
            feeds = ", ".join(f"{holder}=..." for holder in holders)
            reason = feeds or "no key takes its value from it"
            yield Problem(key, f"feeds nothing in this run: {reason}")

    def _holders(self, name: str, value: Any) -> tuple[list[str], list[str]]:
        """Return the arguments that hold a value and were not typed: those of a name, and others.

        Arguments of data.test come before those of data.train.
        """
        of_name = list[str]()
        others = list[str]()
        if value is None:
            return of_name, others
        for key, held in reversed(list(walk(self.values))):
            if held != value or not key.startswith(_READERS):
                continue
            if key in self._primary or self._is_typed(key):
                continue
            if key.endswith(f".{name}"):
                of_name.append(key)
            else:
                others.append(key)
        return of_name, others

    def _is_typed(self, key: str) -> bool:
        return any(source.package is None for source in self._sources_below(key))

    def source_of(self, key: str) -> str | None:
        """Return where a key was set last: the command line, or file:line; None if nowhere."""
        taken = above(key, self._shared)
        if taken:
            key = self._shared[taken] + key.removeprefix(taken)
        typed = [source for source in self._sources_below(key) if source.package is None]
        if typed:
            return typed[-1].shown
        key = above(key, self.sources)
        return self.sources[key].location(key) if key else None


def _data_sets(node: Any, key: str) -> Iterator[tuple[str, Values]]:
    """Yield the data set of a split by its key, or several by name; none for null."""
    if not isinstance(node, dict):
        return
    is_named = bool(node) and "_target_" not in node and all(map(_is_section, node.values()))
    if not is_named:
        yield key, node
        return
    for name, one in node.items():
        yield join(key, name), one


def _is_section(value: Any) -> bool:
    return isinstance(value, dict)


def _without(content: Mapping[str, Any], choice: Choice, path: Sequence[str]) -> Values:
    """Return the content of a file without what a later choice replaces at a path.

    The choice replaces a null or a whole node in the place of the group. A choice of nothing also
    replaces values; a choice of data replaces data sets.
    """
    name, *rest = path
    child = content.get(name)
    if rest and isinstance(child, dict):
        return {**content, name: _without(child, choice, rest)}
    if not rest and (choice.is_empty or child is None or _is_node(child)):
        return {other: value for other, value in content.items() if other != name}
    if choice.key == "data" and isinstance(child, dict):
        return {**content, name: _without_sets(child)}
    return dict(content)


def _without_sets(data: Mapping[str, Any]) -> Values:
    """Return a file's `data` without its whole data sets; values within other sets stay.

    A training set takes all splits with it, also those that are null beside it.
    """
    if _is_set(data.get("train")):
        return {name: value for name, value in data.items() if name not in _SPLITS}
    return {n: value for n, value in data.items() if n not in _SPLITS or not _is_set(value)}


def _is_set(value: Any) -> bool:
    """Return whether a split is described as a whole: by one node, or by several by name."""
    if not isinstance(value, dict) or not value:
        return False
    return _is_node(value) or all(map(_is_node, value.values()))


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def shown_path(path: Path) -> str:
    """Return a path for a message: relative if it lies below the current folder."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):
        return str(path)
    return str(path) if relative.startswith("..") else relative
