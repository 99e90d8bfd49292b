"""Compose a configuration with Hydra, without its jobs, callbacks and working folders.

Overrides are applied without Hydra's struct check, and the result is checked against the schema, so
that all mistakes of a command line are reported together. Nothing here imports torch, unless a
`_target_` was replaced: only the new target tells which of the earlier one's arguments it takes.
"""

import functools
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
    nearest,
    raise_problems,
)
from regimen.conf.interpolation import (
    CLASSES,
    RESERVED,
    Interpolations,
    excessive,
    leaves,
    mapped,
    open_attributes,
    walk,
)
from regimen.conf.schema import Values
from regimen.data.tokenizers import allow_remote_code
from regimen.scripts.cli.arguments import Arguments, RunRequest, key_of, parse_arguments
from regimen.scripts.composition.folders import REFUSED, Folders, opened
from regimen.scripts.composition.overrides import (
    Dimension,
    Overrides,
    SweepOverride,
    first_lines,
    identity,
)
from regimen.scripts.composition.tree import Choice, Source, Tree, shown_path
from regimen.trainer.targets.allow_list import allow, close
from regimen.trainer.targets.instantiate import refused_targets

MAX_JOBS = 10_000  # of a sweep
# The errors of OmegaConf for a value that cannot be resolved.
UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
# Arguments of our callbacks that say where a run is written or sent to. Everything else goes below
# the run's directory.
PLACES = {
    "regimen.callbacks.mirror.Mirror": "to",
    "regimen.callbacks.trackers.mlflow.MLflow": "tracking_uri",
}
_COUNTED = f"${{{CLASSES}}}"
_OPEN = re.compile(r"\$\{(?!(" + "|".join(RESERVED) + r")\})")


def compose(argv: Sequence[str] | Arguments, trains: bool = True) -> "Composition":
    """Compose and check the configuration of one job; raises ConfigError with all mistakes.

    `trains`: False for a command over a finished run, which writes to none of the places that the
    configuration names.
    """
    arguments = argv if isinstance(argv, Arguments) else parse_arguments(argv)
    allow(arguments.allow_targets)
    allow_remote_code(arguments.allow_remote_code)
    allow_protocols(arguments.overrides)
    folders_of_user = list(arguments.config_dirs)
    if arguments.config_path:
        folders_of_user.append(arguments.config_path)
    close(folders_of_user)
    with opened(arguments) as folders:
        composition = Composition(folders, arguments)
        composition.config = composition.resolved(composition.unresolved())
        composition.check(composition.config)
        composition.problems += composition.command_line_only(trains)
    composition.problems[:] = filter(composition._is_certain, composition.problems)
    problems = composition.all_problems()
    if problems:
        error = ConfigError(problems)
        error.more = composition.further
        raise error
    return composition


def split_jobs(arguments: Arguments) -> list[list[SweepOverride]]:
    """Return the overrides of each job of a sweep, each combination once. Raises ConfigError."""
    with _composing(arguments) as composition:
        values = [composition.typed.values_of(override) for override in composition.swept()]
    if math.prod(map(len, values)) > MAX_JOBS:
        raise ConfigError(
            "", f"these values make more than {MAX_JOBS} jobs", "sweep=optuna tries some of them"
        )
    jobs = dict[tuple[str, ...], list[SweepOverride]]()
    for job in itertools.product(*values):
        jobs.setdefault(identity(override.text for override in job), list(job))
    return list(jobs.values())


def split_search(arguments: Arguments) -> tuple[list[SweepOverride], list[Dimension]]:
    """Separate the overrides of all jobs of a search from the dimensions it searches."""
    fixed = list[SweepOverride]()
    dimensions = list[Dimension]()
    fixed_overrides = []
    with _composing(arguments) as composition:
        for override in composition.swept():
            dimension = composition.typed.dimension(override)
            if dimension is None:
                fixed_overrides.append(override)
            else:
                dimensions.append(dimension)
        for override in fixed_overrides:
            fixed += composition.typed.values_of(override)
    return fixed, dimensions


def config_text(arguments: Arguments) -> tuple[str, list[Problem]]:
    """Return the text of `--cfg job`, and the problems; values may still be missing."""
    with opened(arguments) as folders:
        composition = Composition(folders, arguments)
        raw = composition.unresolved()
    resolved = composition.resolved(raw)
    composition.check(resolved, incomplete=True)
    parts = dict(walk(resolved if arguments.resolve else raw))
    key = (arguments.package or "").removeprefix("_global_")
    if key not in parts:
        composition.problems.append(
            Problem("--package", f"there is no {key}", did_you_mean(key, parts))
        )
        composition.stop_if_wrong()
    part = parts[key]
    text = OmegaConf.to_yaml(part) if isinstance(part, dict | list) else f"{part}\n"
    return text, composition.all_problems()


def print_by_hydra(arguments: Arguments) -> None:
    """Let Hydra print its own configuration, or that and the job's: `--cfg hydra`, `--cfg all`."""
    with _composing(arguments) as composition:
        composition.typed.parse(composition.overrides)
        composition.stop_if_wrong()
        try:
            composition.folders.hydra.show_cfg(
                arguments.config_name,
                composition.overrides,
                arguments.cfg,
                arguments.package,
                arguments.resolve,
            )
        except SystemExit:
            composition.problems.append(Problem("--package", f"there is no {arguments.package}"))
        except REFUSED as error:
            composition.problems.append(Problem("", first_lines(error)))


@contextmanager
def _composing(arguments: Arguments) -> Iterator["Composition"]:
    """Open the folders of a composition; at the end, raise ConfigError if there are mistakes."""
    with opened(arguments) as folders:
        composition = Composition(folders, arguments)
        yield composition
    composition.stop_if_wrong()


class Composition:
    """A configuration on its way from the command line to its checks, which import no target."""

    def __init__(self, folders: Folders, arguments: Arguments) -> None:
        self.folders = folders
        self.arguments = arguments
        self.overrides = list(arguments.overrides)
        self.choices = Values()  # the choice for each group
        self.config = Values()  # resolved, but for `${total_steps}` and its like
        self.typed = Overrides(folders, functools.cache(self._groups_with_choice))
        self.problems = self.typed.problems
        self._tree = Tree()
        self._interpolations = Interpolations({})

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
        overrides = self.typed.parse(self.overrides, sweep=False)
        try:
            chosen, values = self.typed.sort(overrides)
            files, self.choices, replacing = self._defaults_list(chosen)
        except REFUSED as error:
            if self.folders.readable:
                self.problems.append(self.folders.explain(error, self.arguments.config_name))
            self.stop_if_wrong()
            raise
        for place, file in enumerate(files):
            later = [choice for choice in replacing if choice.place > place]
            self._merge_file(file, later)
        for override in values:
            self._apply(override)
        makers = {choice.key: choice.file or "" for choice in replacing}
        are_of_data = "data" not in makers and makers.get("transforms", "").startswith("data/")
        typed_groups = [key_of(text).replace("/", ".") for text in chosen]
        self._tree.drop_leftovers(typed_groups, are_transforms_of_data=are_of_data)
        self._tree.share_arguments()
        tree = with_defaults(self._tree.values)
        self._interpolations = Interpolations(tree)
        self.problems += self._tree.problems
        unused = self._tree.unused_keys(self._interpolations)
        self.problems += itertools.islice(unused, MOST_PROBLEMS)
        return tree

    def swept(self) -> list[Override]:
        """Return the overrides of a sweep; of those for the same key the last one counts."""
        return self.typed.effective(self.typed.parse(self.overrides))

    def _groups_with_choice(self) -> set[str]:
        """Return the groups that have a choice before the command line makes any."""
        return set(self._defaults_list([])[1])

    def _defaults_list(self, chosen: list[str]) -> tuple[list[Any], Values, list[Choice]]:
        """Return the files to merge in this order, the choice of each group, replacing choices.

        `chosen`: the choices of the command line, as text for Hydra.
        """
        loader = self.folders.hydra.config_loader
        name = self.arguments.config_name
        replacing_texts = [text for text in chosen if text[0] != "+"]
        listed = loader.compute_defaults_list(name, replacing_texts, RunMode.RUN)
        if replacing_texts != chosen:
            extended = _added_to_lists(chosen, listed.overrides.override_choices)
            listed = loader.compute_defaults_list(name, extended, RunMode.RUN)
        overrides = listed.overrides

        files = list[Any]()
        places = {}
        for file in listed.defaults:
            if not (file.config_path or "hydra").startswith("hydra"):
                places[file.config_path] = len(files)
                files.append(file)
        known = overrides.known_choices.items()
        choices = {group: choice for group, choice in known if not group.startswith("hydra/")}
        replacing = []
        for element, metadata in overrides.override_metadata.items():
            group, _, package = element.partition("@")
            key = package.removeprefix("_global_.") or group.replace("/", ".")
            is_empty = overrides.override_choices[element] in (None, [])
            maker = metadata.containing_config_path
            signs = {text[0] for text in chosen if key_of(text) == group}
            choice = Choice(key, is_empty, signs == {"+"}, maker, places.get(maker, len(files)))
            replacing.append(choice)
        return files, choices, replacing

    def _merge_file(self, file: Any, later: Sequence[Choice]) -> None:
        """Merge a file of the defaults list; `later`: choices that are made after it."""
        folder = self.folders.find(file.config_path)
        if folder is None:
            return
        document = folder.read(file.config_path)
        shown = shown_path(folder.file(file.config_path))
        source = Source(shown, file.package or "", document.lines)
        content = {name: v for name, v in document.values.items() if name != "defaults"}
        self._tree.merge(content, source, file.primary, later)

    def _apply(self, override: Override) -> None:
        """Set or delete a key; a missing one is added, and checked by the schema later."""
        key = override.key_or_group
        content: Any = override.value()
        source = Source(f"command line: {override.input_line}")
        if override.package is not None:
            self.typed.note(
                key, f"{override.input_line} chooses in a group, but there is no group {key!r}"
            )
        elif override.is_delete():
            if problem := self._tree.delete(key, content, source):
                self.typed.note(key, problem)
        else:
            for part in reversed(key.split(".")):
                content = {part: content}
            self._tree.merge(content, source)

    def resolved(self, raw: Values) -> Values:
        """Return the tree with its interpolations resolved; as it is, if one cannot be."""
        problems = list(self._interpolations.problems)
        if any(excessive(raw)):
            self.problems += problems
            return raw
        texts = {}
        for key, text in leaves(raw):
            if isinstance(text, str) and "${" in text:
                texts[key] = text
                problems += _unreadable(key, text)
        if not problems:
            cfg = OmegaConf.create(_with_open_classes(escape_reserved(raw)))
            try:
                plain: Values = mapped(OmegaConf.to_container(cfg, resolve=True), _null_where_named)
                return plain
            except UNRESOLVED:
                problems += filter(None, (_unresolved(cfg, key) for key in texts))
        self.problems += problems
        return raw

    def check(self, raw: Values, incomplete: bool = False) -> None:
        """Check a tree against the schema. Unresolved values are skipped, `???` if `incomplete`."""
        skipped = {problem.key for problem in self.problems}
        for key, value in leaves(raw):
            if isinstance(value, str) and (_OPEN.search(value) or (incomplete and value == "???")):
                skipped.add(key)
        refused = itertools.islice(refused_targets(raw), MOST_PROBLEMS)
        for problem in [*check(raw), *refused]:
            if problem.key not in skipped:
                self.problems.append(self._with_way_out(problem))

    def _with_way_out(self, problem: Problem) -> Problem:
        """Name the group that is meant, where a key is given in place of a choice."""
        section, _, name = problem.key.removesuffix("._target_").partition(".")
        options = self.folders.options("callbacks")
        hint = problem.hint
        if not name and nearest(section, ("experiment", "debug")):
            hint = did_you_mean(section, ("experiment", "debug"))
        elif problem.key == f"callbacks.{name}._target_":
            hint = did_you_mean(name, options)
            if name in options:
                hint = f"+callbacks={name} chooses this callback"
        return replace(problem, hint=hint)

    def command_line_only(self, trains: bool) -> Iterator[Problem]:
        """Yield the values that a file sets and only the person who starts the run may set."""
        values = dict(leaves(self.config))
        yield from wrong_addresses(values.items())
        places = _keys_of_places(values) if trains else set()
        for key, value in values.items():
            if key in places and value not in (None, "???") and not self._is_typed(key):
                yield Problem(
                    key,
                    f"is {format_value(value)}: no file says where a run is written or goes on",
                    f"type {key}={value} on the command line",
                )
            if not isinstance(value, str) or not re.search(r"\w://", value):
                continue
            if self._interpolations.from_environment(key) and not self._is_typed(key):
                yield Problem(
                    key,
                    "is an address that an environment variable is part of, to be sent away",
                    f"if you trust it, type {key}=... on the command line",
                )

    def request(self, argv: Sequence[str], **how: Any) -> RunRequest:
        """Return what a run does with the configuration; `argv`: as typed."""
        allowed = list(self.arguments.allow_targets)
        return RunRequest(
            self.config,
            self.overrides,
            self.choices,
            list(argv),
            allowed,
            self.arguments.allow_remote_code,
            **how,
        )

    def further(self) -> list[Problem]:
        """Return the mistakes in the targets of what is sound so far; imports them, and torch."""
        from regimen.trainer.assembly.check import check_targets

        # With the nearest choice in place of a misspelt one, the rest can be checked.
        guessed = self.typed.guessed
        wrong_so_far = [problem.key for problem in self.problems if problem.key not in guessed]
        problems = list[Problem]()
        # Of a configuration with holes a part may fail in a way that nobody has foreseen.
        with suppress(Exception):
            values, wrong = self._resolvable(wrong_so_far)
            config, hidden = parse_sound(values, wrong)
            problems += map(self._located, hidden)
            with collect_problems(problems), self.locating():
                check_targets(config, [*wrong, *(problem.key for problem in hidden)])
        return [problem for problem in problems if self._is_certain(problem)]

    def _is_certain(self, problem: Problem) -> bool:
        """Return whether a mistake is one whatever the files hold that cannot be read."""
        return self.folders.readable or problem.file is not None or self._is_typed(problem.key)

    def _resolvable(self, wrong: Sequence[str]) -> tuple[Values, list[str]]:
        """Return the resolved values without wrong keys and what refers to them, and all these.

        A key that is left out can leave interpolations without their target, which are wrong then.
        """
        raw = with_defaults(self._tree.values)
        left_out = list[str]()
        while wrong:
            for key in wrong:
                drop(raw, key)
            left_out += wrong
            wrong = [problem.key for problem in Interpolations(raw).problems]
        cfg = OmegaConf.create(escape_reserved(raw))
        left_out += [key for key, _ in leaves(raw) if _unresolved(cfg, key)]
        for key in left_out:
            drop(raw, key)
        sound = OmegaConf.create(escape_reserved(raw))
        return OmegaConf.to_container(sound, resolve=True), left_out  # type: ignore[return-value]

    def all_problems(self) -> list[Problem]:
        """Return the mistakes so far, each with its file; of very many the first ones."""
        problems = list[Problem]()
        for document in self.folders.documents.values():
            problems += document.problems
        problems += self.problems
        located = [self._located(problem) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) >= MOST_PROBLEMS:
            located.append(Problem("", "there may be further mistakes, which are not looked for"))
        return located

    def stop_if_wrong(self) -> None:
        """Raise ConfigError if there are mistakes so far."""
        raise_problems(self.all_problems())

    def _located(self, problem: Problem) -> Problem:
        """Return a problem with the file and line of its key, or the override that was typed.

        A value that is taken over from a typed key was written there.
        """
        if problem.file:
            return problem
        source = self._interpolations.source(problem.key)
        key = source if self._is_typed(source) else problem.key
        return replace(problem, file=self._tree.source_of(key))

    def _is_typed(self, key: str) -> bool:
        """Return whether the value of a key, or one that it takes over, was typed."""
        source = self._interpolations.source(key)
        where = self._tree.source_of(source) or self._tree.source_of(key) or ""
        return where.startswith("command line")


def _added_to_lists(chosen: list[str], replaced: dict[str, Any]) -> list[str]:
    """Return the choices of a command line with all `+group=x` of a group as one list.

    Hydra adds choices to a list of the primary file once, and to no other. `replaced`: the choices
    that later files or the command line have made, by group.
    """
    added = dict[str, list[str]]()
    for text in chosen:
        if text[0] == "+":
            names = text.partition("=")[2].strip("[]").split(",")
            added.setdefault(key_of(text), []).extend(name.strip() for name in names)
    extended = [text for text in chosen if key_of(text) not in added]
    for group, names in added.items():
        before = replaced.get(group) or []
        sign = "" if group in replaced else "+"
        names = [*([before] if isinstance(before, str) else before), *names]
        extended.append(f"{sign}{group}=[{','.join(dict.fromkeys(names))}]")
    return extended


def _keys_of_places(values: Values) -> set[str]:
    """Return the keys that say where a run is written, sent to, or goes on."""
    places = {"run_dir", "resume"}
    for key, value in values.items():
        node = key.removesuffix("_target_")
        if node != key and value in PLACES:
            places |= {f"{node}{PLACES[value]}", f"{node}_args_.0"}
    return places


def _unreadable(key: str, text: str) -> Iterator[Problem]:
    """Yield why OmegaConf could not read or resolve the interpolations of a text."""
    try:
        OmegaConf.create({"text": text})
    except UNRESOLVED:
        message = f"{text!r} is not an interpolation that can be read"
        yield Problem(key, message, r"close its brace, or write \${ for the text itself")
    for name in re.findall(r"\$\{oc\.env:(\w+)\}", text):
        if name not in os.environ:
            message = f"the environment variable {name} is not set"
            yield Problem(key, message, f"set it, or give a default: ${{oc.env:{name},VALUE}}")


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


def escape_reserved(raw: Values) -> Values:
    """Escape the interpolations that stay open, so that resolution leaves them as they are."""
    names = "|".join(map(re.escape, [*RESERVED, *open_attributes(raw)]))
    stays_open = re.compile(rf"(?<!\\)\$\{{({names})\}}")

    def escape(value: Any) -> Any:
        return stays_open.sub(r"\\${\1}", value) if isinstance(value, str) else value

    return dict(mapped(raw, escape))


def _with_open_classes(raw: Values) -> Values:
    """Escape `${data.num_classes}` if it is null: the classes are counted in the data, later."""
    data = raw.get("data")
    if not isinstance(data, dict) or data.get("num_classes", 0) is not None:
        return raw

    def escape(value: Any) -> Any:
        return value.replace(_COUNTED, rf"\{_COUNTED}") if isinstance(value, str) else value

    return {name: part if name == "data" else mapped(part, escape) for name, part in raw.items()}


def _null_where_named(part: Any) -> Any:
    """Return a section with null for its own open `num_classes`: so a run has always stored it."""
    is_open = isinstance(part, dict) and part.get("num_classes") == _COUNTED
    return {**part, "num_classes": None} if is_open else part
