"""Compose a configuration with Hydra, without its jobs, callbacks and working folders.

Overrides are applied without Hydra's struct check, and the result is checked against the schema, so
that all mistakes of a command line are reported together. Nothing here imports torch, but where a
`_target_` was replaced: what it takes of the earlier one's arguments, only it can tell.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from regimen.conf.addresses import allow_protocols, wrong_addresses
from regimen.conf.check import check, drop, format_value, parse_sound, with_defaults
from regimen.conf.errors import (
    MOST_PROBLEMS,
    ConfigError,
    Problem,
    collect_problems,
    did_you_mean,
    raise_problems,
)
from regimen.conf.interpolation import (
    CLASSES,
    RESERVED,
    Interpolations,
    excessive,
    leaves,
    mapped,
    walk,
)
from regimen.conf.schema import Values
from regimen.scripts.cli.arguments import Arguments, Request, key_of, parse_arguments
from regimen.scripts.composition.folders import REFUSED, Folders, opened
from regimen.scripts.composition.overrides import Dimension, Overrides, Swept, first_lines, identity
from regimen.scripts.composition.tree import Choice, Source, Tree, shown_path
from regimen.trainer.targets.allow_list import allow, close
from regimen.trainer.targets.instantiate import refused_targets

MAX_JOBS = 10_000  # of a sweep
# What OmegaConf raises if a value cannot be resolved.
UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
# Arguments of ours that say where a run is written, or sent to. All else goes below its directory.
PLACES = {
    "regimen.callbacks.mirror.Mirror": "to",
    "regimen.callbacks.trackers.mlflow.MLflow": "tracking_uri",
}
_COUNTED = f"${{{CLASSES}}}"
_NAMES = "|".join(RESERVED)
_RESERVED = re.compile(r"(?<!\\)\$\{(" + _NAMES + r")\}")
_OPEN = re.compile(r"\$\{(?!(" + _NAMES + r")\})")


def compose(argv: Sequence[str] | Arguments, trains: bool = True) -> "Composition":
    """Compose and check the configuration of one job; raises ConfigError with all mistakes.

    Not `trains`: a command over a finished run, which goes to none of the places that it names.
    """
    arguments = argv if isinstance(argv, Arguments) else parse_arguments(argv)
    allow(arguments.allow_targets)
    allow_protocols(arguments.overrides)
    close([*arguments.config_dirs, *filter(None, [arguments.config_path])])
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        it.config = it.resolved(it.unresolved())
        it.check(it.config)
        it.problems += it.not_typed(trains)
    it.problems[:] = filter(it._is_certain, it.problems)
    if found := it.found():
        error = ConfigError(found)
        error.more = it.further
        raise error
    return it


def split_jobs(arguments: Arguments) -> list[list[Swept]]:
    """Return the overrides of each job of a sweep, each combination once. Raises ConfigError."""
    with _composing(arguments) as it:
        lists = [it.typed.values_of(override) for override in it.swept()]
    if math.prod(len(values) for values in lists) > MAX_JOBS:
        raise ConfigError(f"these values make more than {MAX_JOBS} jobs")
    jobs = dict[tuple[str, ...], list[Swept]]()
    for job in map(list, itertools.product(*lists)):
        jobs.setdefault(identity(override.text for override in job), job)
    return list(jobs.values())


def split_search(arguments: Arguments) -> tuple[list[Swept], list[Dimension]]:
    """Separate the overrides of all jobs of a search from the dimensions it searches."""
    with _composing(arguments) as it:
        parsed = [(it.typed.dimension(o), o) for o in it.swept()]
        fixed = [s for varied, o in parsed if varied is None for s in it.typed.values_of(o)]
    return fixed, [varied for varied, _ in parsed if varied is not None]


def config_text(arguments: Arguments) -> tuple[str, list[Problem]]:
    """Return what `--cfg job` prints, and the problems; values may still be missing."""
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        raw = it.unresolved()
    resolved = it.resolved(raw)
    it.check(resolved, incomplete=True)
    parts = dict(walk(resolved if arguments.resolve else raw))
    key = (arguments.package or "").removeprefix("_global_")
    if key not in parts:
        it.problems.append(Problem("--package", f"there is no {key}", did_you_mean(key, parts)))
        it.stop_if_wrong()
    part = parts[key]
    return OmegaConf.to_yaml(part) if isinstance(part, dict | list) else f"{part}\n", it.found()


def print_by_hydra(arguments: Arguments) -> None:
    """Let Hydra print its own configuration, or that and the job's: `--cfg hydra`, `--cfg all`."""
    format_value = arguments.cfg, arguments.package, arguments.resolve
    with _composing(arguments) as it:
        it.typed.parse(it.overrides)
        it.stop_if_wrong()
        try:
            it.folders.hydra.show_cfg(arguments.config_name, it.overrides, *format_value)
        except SystemExit:
            it.problems.append(Problem("--package", f"there is no {arguments.package}"))
        except REFUSED as error:
            it.problems.append(Problem("", first_lines(error)))


@contextmanager
def _composing(arguments: Arguments) -> Iterator["Composition"]:
    with opened(arguments) as folders:
        yield (it := Composition(folders, arguments))
    it.stop_if_wrong()


class Composition:
    """A configuration on its way from the command line to its checks, which import no target."""

    def __init__(self, folders: Folders, arguments: Arguments) -> None:
        self.folders = folders
        self.arguments = arguments
        self.overrides = list(arguments.overrides)
        self.choices = Values()  # the choice for each group
        self.config = Values()  # resolved, but for `${total_steps}` and its like
        self.typed = Overrides(folders)
        self.problems = self.typed.problems
        self._tree = Tree()
        self._followed = Interpolations({})

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line to mistakes that are raised within."""
        try:
            yield
        except ConfigError as error:
            error.change(self._located)
            raise

    def unresolved(self) -> Values:
        """Return the composed tree with its interpolations."""
        parsed = self.typed.parse(self.overrides, sweep=False)
        try:
            picked, values = self.typed.sort(parsed, self._known)
            defaults, self.choices, choices = self._listed(picked)
        except REFUSED as error:
            if self.folders.readable:
                self.problems.append(self.folders.meant(error, self.arguments.config_name))
            self.stop_if_wrong()
            raise
        for place, default in enumerate(defaults):
            if folder := self.folders.find(default.config_path):
                found, path = folder.read(default.config_path), folder.file(default.config_path)
                source = Source(shown_path(path), default.package or "", found.lines)
                content = {name: v for name, v in found.values.items() if name != "defaults"}
                later = [choice for choice in choices if choice.place > place]
                self._tree.merge(content, source, default.primary, later)
        for override in values:
            self._apply(override)
        chosen = [key_of(text).replace("/", ".") for text in picked]
        self._tree.drop_leftovers(chosen)
        tree = with_defaults(self._tree.values)
        self._followed = Interpolations(tree)
        unread = itertools.islice(self._tree.unused_keys(self._followed), MOST_PROBLEMS)
        self.problems += [*self._tree.problems, *unread]
        return tree

    def swept(self) -> list[Override]:
        """Return the overrides of a sweep; of those for the same key the last one counts."""
        return self.typed.effective(self.typed.parse(self.overrides), self._known)

    def _known(self) -> set[str]:
        """Return the groups that have a choice before the command line makes any."""
        return set(self._listed([])[1])

    def _listed(self, picked: list[str]) -> tuple[list[Any], Values, list[Choice]]:
        """Return the files to be merged in this order, the choice for each group, and from where.

        The last are those that replace an earlier choice.
        """
        loader, name = self.folders.hydra.config_loader, self.arguments.config_name
        listed = loader.compute_defaults_list(name, picked, RunMode.RUN)
        replaced = listed.overrides.override_choices
        before_all = list(picked)
        for text in before_all:
            key = key_of(text)
            if text[0] != "+" or key not in replaced:
                continue
            # Hydra adds a choice to a list of the primary file, to no other.
            before = replaced[key] or []
            replaced[key] = [*([before] if isinstance(before, str) else before), *_listed_in(text)]
            picked = [one for one in picked if key_of(one) != key]
            picked.append(f"{key}=[{','.join(replaced[key])}]")
        if picked != before_all:
            listed = loader.compute_defaults_list(name, picked, RunMode.RUN)
        files = [d for d in listed.defaults if not (d.config_path or "hydra").startswith("hydra")]
        known = listed.overrides.known_choices
        places = {file.config_path: place for place, file in enumerate(files)}
        choices = []
        for element, where in listed.overrides.override_metadata.items():
            group, _, package = element.partition("@")
            key = package.removeprefix("_global_.") or group.replace("/", ".")
            is_empty = listed.overrides.override_choices[element] in (None, [])
            place = places.get(where.containing_config_path, len(files))
            choices.append(Choice(key, is_empty, place))
        return (
            files,
            {g: choice for g, choice in known.items() if not g.startswith("hydra/")},
            choices,
        )

    def _apply(self, override: Override) -> None:
        """Set or delete a key; a missing one is added, and checked by the schema later."""
        key = override.key_or_group
        content: Any = override.value()
        source = Source(f"command line: {override.input_line}")
        if override.package is not None:
            message = f"{override.input_line} chooses in a group, but there is no group {key!r}"
            self.typed.note(key, message)
        elif override.is_delete():
            if problem := self._tree.delete(key, content, source):
                self.typed.note(key, problem)
        else:
            for part in reversed(key.split(".")):
                content = {part: content}
            self._tree.merge(content, source)

    def resolved(self, raw: Values) -> Values:
        """Return the tree with its interpolations resolved; as it is, if one cannot be."""
        found = list(self._followed.problems)
        if any(excessive(raw)):
            self.problems += found
            return raw
        texts = {key: text for key, text in leaves(raw) if isinstance(text, str) and "${" in text}
        for key, text in texts.items():
            try:
                OmegaConf.create({"text": text})
            except UNRESOLVED:
                message = f"{text!r} is not an interpolation that can be read"
                hint = r"close its brace, or write \${ for the text itself"
                found.append(Problem(key, message, hint))
            for name in re.findall(r"\$\{oc\.env:(\w+)\}", text):
                if name not in os.environ:
                    hint = f"set it, or give a default: ${{oc.env:{name},VALUE}}"
                    found.append(Problem(key, f"the environment variable {name} is not set", hint))
        if not found:
            cfg = OmegaConf.create(_with_open_classes(escape_reserved(raw)))
            try:
                plain: Values = mapped(OmegaConf.to_container(cfg, resolve=True), _null_where_named)
                return plain
            except UNRESOLVED:
                found = [p for key in texts if (p := _unresolved(cfg, key))]
        self.problems += found
        return raw

    def check(self, raw: Values, incomplete: bool = False) -> None:
        """Check a tree against the schema; unresolved values are skipped."""
        open_keys = {problem.key for problem in self.problems}
        for key, value in leaves(raw):
            if isinstance(value, str) and (_OPEN.search(value) or (incomplete and value == "???")):
                open_keys.add(key)
        wrong = [*check(raw), *itertools.islice(refused_targets(raw), MOST_PROBLEMS)]
        self.problems += [problem for problem in wrong if problem.key not in open_keys]

    def not_typed(self, trains: bool) -> Iterator[Problem]:
        """Name what only the person who starts the run may say, and a file says instead."""
        found = dict(leaves(self.config))
        yield from wrong_addresses(found.items())
        places = {"run_dir", "resume"}
        for key, value in found.items():
            node = key.removesuffix("_target_")
            if node != key and value in PLACES:
                places |= {f"{node}{PLACES[value]}", f"{node}_args_.0"}
        for key, value in found.items():
            said = value not in (None, "???")
            if trains and said and key in places and not self._is_typed(key):
                message = (
                    f"is {format_value(value)}: no file says where a run is written or goes on"
                )
                yield Problem(key, message, f"type {key}={value} on the command line")
            address = isinstance(value, str) and re.search(r"\w://", value)
            if address and self._followed.from_environment(key) and not self._is_typed(key):
                message = "is an address that an environment variable is part of, to be sent away"
                yield Problem(key, message, f"if you trust it, type {key}=... on the command line")

    def request(self, argv: Sequence[str], **how: Any) -> Request:
        """Return what a run does with the configuration; `argv`: as typed."""
        allowed = list(self.arguments.allow_targets)
        return Request(self.config, self.overrides, self.choices, list(argv), allowed, **how)

    def further(self) -> list[Problem]:
        """Return the mistakes in the targets of what is sound so far; imports them, and torch."""
        from regimen.trainer.assembly.check import check_targets

        guessed = self.typed.guessed
        known = [problem.key for problem in self.problems if problem.key not in guessed]
        found = list[Problem]()
        # Of a configuration with holes a part may fail in a way that nobody has foreseen.
        with suppress(Exception):
            values, wrong = self._resolvable(known)
            config, hidden = parse_sound(values, wrong)
            found += map(self._located, hidden)
            with collect_problems(found), self.locating():
                check_targets(config, [*wrong, *(problem.key for problem in hidden)])
        return [problem for problem in found if self._is_certain(problem)]

    def _is_certain(self, problem: Problem) -> bool:
        """Return whether a mistake is one whatever the files hold that cannot be read."""
        return self.folders.readable or problem.file is not None or self._is_typed(problem.key)

    def _resolvable(self, wrong: Sequence[str]) -> tuple[Values, list[str]]:
        """Return the resolved values without wrong keys and what refers to them, and all these."""
        raw, left_out = with_defaults(self._tree.values), list[str]()
        while wrong:
            for key in wrong:
                drop(raw, key)
            left_out += wrong
            wrong = [problem.key for problem in Interpolations(raw).problems]
        cfg = OmegaConf.create(escape_reserved(raw))
        left_out += [key for key, _ in leaves(raw) if _unresolved(cfg, key)]
        for key in left_out:
            drop(raw, key)
        whole = OmegaConf.create(escape_reserved(raw))
        return OmegaConf.to_container(whole, resolve=True), left_out  # type: ignore[return-value]

    def found(self) -> list[Problem]:
        """Return the mistakes so far, each with its file; of very many the first ones."""
        in_files = [p for document in self.folders.documents.values() for p in document.problems]
        found = [*in_files, *self.problems]
        first = [self._located(problem) for problem in found[:MOST_PROBLEMS]]
        if len(found) >= MOST_PROBLEMS:
            first.append(Problem("", "there may be further mistakes, which are not looked for"))
        return first

    def stop_if_wrong(self) -> None:
        """Raise ConfigError if there are mistakes so far."""
        raise_problems(self.found())

    def _located(self, problem: Problem) -> Problem:
        if problem.file:
            return problem
        source = self._followed.source(problem.key)  # if the user typed that one
        key = source if self._is_typed(source) else problem.key
        return replace(problem, file=self._tree.source_of(key))

    def _is_typed(self, key: str) -> bool:
        where = self._tree.source_of(self._followed.source(key)) or self._tree.source_of(key) or ""
        return where.startswith("command line")


def _listed_in(text: str) -> list[str]:
    """Return the choices that an override names: one, or those of a list."""
    return [choice.strip() for choice in text.partition("=")[2].strip("[]").split(",")]


def _unresolved(cfg: DictConfig, key: str) -> Problem | None:
    """Return why a value cannot be resolved; None if it can, or refers to a missing value."""
    node = cfg
    try:
        for name in key.split("."):
            node = node[int(name) if OmegaConf.is_list(node) else name]
    except UNRESOLVED as error:
        if "MissingMandatory" not in f"{type(error).__name__} {error}":
            return Problem(key, first_lines(error))
    return None


def escape_reserved(node: Any) -> Any:
    """Escape the reserved interpolations, so that resolution leaves them as they are."""
    return mapped(node, lambda v: _RESERVED.sub(r"\\${\1}", v) if isinstance(v, str) else v)


def _with_open_classes(raw: Values) -> Values:
    """Escape `${data.num_classes}` where it is null: the data sets, once open, tell it."""
    data = raw.get("data")
    if not isinstance(data, dict) or data.get("num_classes", 0) is not None:
        return raw

    def escaped(value: Any) -> Any:
        return value.replace(_COUNTED, rf"\{_COUNTED}") if isinstance(value, str) else value

    return {name: part if name == "data" else mapped(part, escaped) for name, part in raw.items()}


def _null_where_named(part: Any) -> Any:
    """Return a section whose `num_classes` is null where it is open, as it always was stored."""
    is_open = isinstance(part, dict) and part.get("num_classes") == _COUNTED
    return {**part, "num_classes": None} if is_open else part
