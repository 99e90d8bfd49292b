"""From overrides and files to a checked configuration, collecting all mistakes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.check import check, fill_defaults, shown
from conf.errors import ConfigError, Problem
from conf.interpolation import RESERVED, Interpolations, children, leaves
from scripts.cli.arguments import Arguments
from scripts.composition.defaults import meant
from scripts.composition.folders import REFUSED, Folders
from scripts.composition.overrides import Overrides, first_lines
from scripts.composition.tree import Source, Tree, shown_path
from trainer.targets.instantiate import refused_targets

# What OmegaConf raises if a value cannot be resolved.
UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
_NAMES = "|".join(RESERVED)
_RESERVED = re.compile(r"(?<!\\)\$\{(" + _NAMES + r")\}")
_OPEN = re.compile(r"\$\{(?!(" + _NAMES + r")\})")


class Composition:
    """From overrides to a checked configuration, collecting all mistakes."""

    def __init__(self, folders: Folders, arguments: Arguments) -> None:
        self.folders = folders
        self.loader = folders.hydra.config_loader
        self.arguments = arguments
        self.overrides = Overrides(folders)
        self.problems = self.overrides.problems
        self.tree = Tree()
        self.followed = Interpolations({})
        self.choices: dict[str, Any] = {}  # the choice for each group

    def checked(self) -> dict[str, Any]:
        """Return the configuration. Raises ConfigError with all mistakes."""
        raw = self.resolved(self.unresolved())
        self.check(raw)
        self.problems += self._not_typed(raw)
        self.stop_if_wrong()
        return raw

    def check(self, raw: dict[str, Any], incomplete: bool = False) -> None:
        """Check a tree against the schema; unresolved values are skipped."""
        open_keys = {problem.key for problem in self.problems}
        for key, value in leaves(raw):
            if isinstance(value, str) and (_OPEN.search(value) or (incomplete and value == "???")):
                open_keys.add(key)
        self.problems += [problem for problem in check(raw) if problem.key not in open_keys]
        self.problems += refused_targets(raw)

    def _not_typed(self, raw: dict[str, Any]) -> Iterator[Problem]:
        """Name what only the person who starts the run may say, and a file says instead."""
        for key in ("run_dir", "resume"):
            if raw.get(key) is not None and not self._is_typed(key):
                message = f"is {shown(raw[key])}: no file says where a run is written or goes on"
                yield Problem(key, message, f"type {key}={raw[key]} on the command line")
        for key, value in leaves(raw):
            address = isinstance(value, str) and re.search(r"\w://", value)
            if address and self.followed.from_environment(key) and not self._is_typed(key):
                message = "is an address that an environment variable is part of, to be sent away"
                yield Problem(key, message, f"if you trust it, type {key}=... on the command line")

    def unresolved(self) -> dict[str, Any]:
        """Return the composed tree with its interpolations."""
        picked, values = self.overrides.sort(self.parse(), lambda: set(self._listed([])[1]))
        try:
            defaults, self.choices = self._listed(picked)
        except REFUSED as error:
            if all(document.readable for document in self.folders.documents.values()):
                self.problems.append(meant(error, self.folders, self.arguments.config_name))
            self.stop_if_wrong()
            raise
        for default in defaults:
            folder = self.folders.find(default.config_path)
            if folder is not None:
                found, path = folder.read(default.config_path), folder.file(default.config_path)
                source = Source(shown_path(path), default.package or "", found.lines)
                content = {name: v for name, v in found.values.items() if name != "defaults"}
                self.tree.merge(content, source, default.primary)
        if not all(document.readable for document in self.folders.documents.values()):
            self.stop_if_wrong()
        for override in values:
            self._apply(override)
        chosen = [text.lstrip("+").partition("=")[0].replace("/", ".") for text in picked]
        self.tree.drop_leftovers(chosen)
        tree = fill_defaults(self.tree.values)
        self.followed = Interpolations(tree)
        self.problems += [*self.tree.problems, *self.tree.unread(self.followed)]
        return tree

    def _listed(self, choices: list[str]) -> tuple[list[Any], dict[str, Any]]:
        """Return the files to be merged, in this order, and the choice for each group."""
        name = self.arguments.config_name
        listed = self.loader.compute_defaults_list(name, choices, RunMode.RUN)
        files = [d for d in listed.defaults if not (d.config_path or "hydra").startswith("hydra")]
        known = listed.overrides.known_choices
        return files, {g: choice for g, choice in known.items() if not g.startswith("hydra/")}

    def _apply(self, override: Override) -> None:
        """Set or delete a key; a missing one is added, and checked by the schema later."""
        key, value = override.key_or_group, override.value()
        source = Source(f"command line: {override.input_line}")
        if override.package is not None:
            message = f"{override.input_line} chooses in a group, but there is no group {key!r}"
            self.overrides.note(key, message)
        elif override.is_delete():
            if (problem := self.tree.delete(key, value, source)) is not None:
                self.overrides.note(key, problem)
        else:
            content: Any = value
            for part in reversed(key.split(".")):
                content = {part: content}
            self.tree.merge(content, source)

    def found(self) -> list[Problem]:
        """Return all mistakes so far, each with its file."""
        in_files = [p for document in self.folders.documents.values() for p in document.problems]
        return [*in_files, *map(self.located, self.problems)]

    def stop_if_wrong(self) -> None:
        """Raise ConfigError if there are mistakes so far."""
        if problems := self.found():
            raise ConfigError(problems)

    def located(self, problem: Problem) -> Problem:
        """Return a problem with the file and line of its key."""
        if problem.file:
            return problem
        source = self.followed.source(problem.key)  # if the user typed that one
        key = source if self._is_typed(source) else problem.key
        return replace(problem, file=self.tree.of(key))

    def _is_typed(self, key: str) -> bool:
        where = self.tree.of(self.followed.source(key)) or self.tree.of(key) or ""
        return where.startswith("command line")

    def parse(self, sweep: bool = False) -> list[Override]:
        """Parse the overrides of the command line."""
        return self.overrides.parse(self.arguments.overrides, sweep)

    def resolved(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with its interpolations resolved; what cannot be is left as it is."""
        try:
            OmegaConf.create(raw)
            problems = list(self.followed.problems)
        except UNRESOLVED:
            problems = [*self.followed.problems, *_unreadable(raw)]
        self.problems += problems
        sound = without(raw, {problem.key for problem in problems}) if problems else raw
        if problems and Interpolations(sound).problems:
            return raw
        cfg = OmegaConf.create(escape_reserved(sound))
        try:
            return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
        except UNRESOLVED:
            self.problems += _unresolved(cfg, "")
            return sound


def _unreadable(raw: dict[str, Any]) -> Iterator[Problem]:
    for key, text in leaves(raw):
        try:
            OmegaConf.create({"text": text})
        except UNRESOLVED:
            message = f"{text!r} is not an interpolation that can be read"
            hint = r"close its brace, or write \${ for the text itself"
            yield Problem(key, message, hint)


def _unresolved(node: Any, key: str) -> Iterator[Problem]:
    """Resolve each leaf of an OmegaConf tree and yield a problem for each failure.

    References to a missing value are skipped: the missing value is reported itself.
    """
    for here, _ in children(OmegaConf.to_container(node), key):
        name: Any = here.rpartition(".")[2]
        try:
            child = node[int(name) if OmegaConf.is_list(node) else name]
        except UNRESOLVED as error:
            if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
                way = f"set it, or give a default: ${{oc.env:{unset[1]},VALUE}}"
                yield Problem(here, f"the environment variable {unset[1]} is not set", way)
            elif "MissingMandatory" not in f"{type(error).__name__} {error}":
                yield Problem(here, first_lines(error))
            continue
        if OmegaConf.is_config(child):
            yield from _unresolved(child, here)


def without(node: Any, keys: set[str], key: str = "") -> Any:
    """Return a copy of a tree in which the values of `keys` are missing."""
    if key in keys:
        return "???"
    values = [without(child, keys, here) for here, child in children(node, key)]
    if isinstance(node, dict):
        return dict(zip(node, values, strict=True))
    return values if isinstance(node, list) else node


def escape_reserved(node: Any) -> Any:
    """Escape the reserved interpolations, so that resolution leaves them as they are."""
    if isinstance(node, dict):
        return {key: escape_reserved(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escape_reserved(value) for value in node]
    return _RESERVED.sub(r"\\${\1}", node) if isinstance(node, str) else node
