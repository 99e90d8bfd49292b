"""The overrides of a command line: parse them one by one, check and sort them, identify jobs."""

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from regimen.conf.errors import ConfigError, Problem, nearest, raise_problems
from regimen.conf.fields import affects_result, declared
from regimen.conf.interpolation import above, walk
from regimen.conf.schema import Config
from regimen.scripts.cli.arguments import key_of, quoted
from regimen.scripts.composition.tree import shown_path

# Groups that every run needs.
NEEDED = ("model", "data", "loader", "task", "optimizer", "trainer", "strategy")
# Groups in which a second choice makes no sense.
SINGLE_CHOICE = (
    *NEEDED,
    "loader/sampler",
    "loader/batch_sampler",
    "lr_scheduler",
    "lr_scheduler/warmup",
    "sweep",
)
# Groups searched when the user types a bare word (`train resnet18`).
_SEARCHED_GROUPS = (
    "experiment",
    *NEEDED,
    "lr_scheduler",
    "callbacks",
    "transforms",
    "debug",
    "sweep",
)
_MAX_KEY = 255  # bytes of a key, which Hydra looks for among the names of folders
NO_HYDRA = "Hydra's own keys cannot be set; run_dir=DIR and --config-dir DIR can"
# Keys that differ between any two starts of a run.
START_KEYS = tuple(name for name, key in declared(Config).items() if key.of_start)


@dataclass(frozen=True, slots=True)
class SweepOverride:
    """An override of one job of a sweep."""

    text: str  # as on the job's command line
    key: str
    value: str
    varies: bool  # has different values in other jobs


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values that a search may give a key: a list, or the numbers from `low` to `high`."""

    key: str  # as on a command line, including `+`
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    integers: bool = False  # both ends are integers
    log: bool = False
    step: float | None = None  # between the numbers

    @property
    def name(self) -> str:
        """The key without signs."""
        return self.key.lstrip("+")


@dataclass(slots=True)
class Overrides:
    """The overrides of a composition, and their problems."""

    folders: Any  # `Folders` of folders.py, which imports this module
    # Returns the groups that have a choice before the command line makes any: `+` cannot add one.
    has_choice: Callable[[], set[str]]
    problems: list[Problem] = field(default_factory=list)
    guessed: set[str] = field(default_factory=set)  # groups whose choice is misspelt

    def parse(self, texts: Sequence[str], sweep: bool = True) -> list[Override]:
        """Parse each text, collecting all mistakes. Without `sweep`, several values are one."""
        parser = OverridesParser.create(self.folders.hydra.config_loader)
        overrides = list[Override]()
        rest = list(texts)
        while rest:
            try:
                override = parser.parse_overrides(rest[:1])[0]
            except Exception as error:  # of the grammar, or an internal one of the parser
                words, hint = self._intended(rest)
                given = " ".join(rest[:words])
                if hint:
                    self.note(given, "not an override", hint)
                else:
                    reason = first_lines(error).removeprefix("LexerNoViableAltException: ")
                    self.note(given, f"not an override: {reason}")
                del rest[:words]
                continue
            if self._is_allowed(override, rest.pop(0), sweep):
                overrides.append(override)
        return overrides

    def _is_allowed(self, override: Override, text: str, sweep: bool) -> bool:
        """Return whether a parsed override may be used, noting why not."""
        key = override.key_or_group
        if not key:
            self.note(text, "not an override: there is no key before the equals sign")
        elif len(key.encode()) > _MAX_KEY:
            self.note(f"{text[:40]}...", f"longer than {_MAX_KEY} bytes")
        elif re.match(r"hydra([./@]|$)", key) or (override.package or "").startswith("hydra"):
            self.note(key, NO_HYDRA)
        elif override.is_sweep_override() and not sweep:
            hint = f"-m sweeps over them; {key}=[...] is a list; \"{key}='...'\" is text"
            number = _with_decimal_point(text)
            if number:
                hint = f"a number has a decimal point: {number}; {hint}"
            self.note(key, f"several values in {text!r}", hint)
        else:
            return True
        return False

    def _intended(self, texts: Sequence[str]) -> tuple[int, str | None]:
        """Return how many words, from the first on, form one mistake, and how to write it."""
        word = texts[0]
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            path = Path(word)
            option = f"--config-dir {path.parent.parent} " if len(path.parts) > 2 else ""
            return 1, f"write {option}{path.parent.name or 'experiment'}={path.stem}"
        call = re.fullmatch(r"([\w/]+)=(\w+)\((\w+=.*)\)", word)  # optimizer=adam(lr=0.1)
        if call:
            group, choice, values = call.groups()
            line = f"{group}={choice}"
            for value in values.split(","):
                line += f" {group}.{value.strip()}"
            return 1, f"write {line}"
        lines = list(accumulate(texts, "{} {}".format))
        if _open_brackets(word) > 0:  # the shell has cut `[a, b]` at its blank
            for count, line in enumerate(lines, 1):
                if _open_brackets(line) == 0:
                    return count, f"quote it: '{line}'"
            return 1, "a bracket is open: close it"
        if "=~" in word:
            return 1, "write $HOME for ~, or quote the text"
        if "=" in word:
            return 1, _as_text(word)
        spelled = re.match(r"([^\s=:]+)( ?= ?|: ?| )([^\s=]+)(?!\S)", lines[-1])  # seed: 3
        if spelled and (spelled[2] != " " or self.folders.is_group(word)):
            count = 1
            while len(lines[count - 1]) < spelled.end():
                count += 1
            return count, f"write {spelled[1]}={spelled[3]}"
        choices = []
        for group in _SEARCHED_GROUPS:
            if self.folders.find(f"{group}/{word}") is not None:
                choices.append(f"{group}={word}")
        return 1, f"did you mean {' or '.join(choices)}?" if choices else "write key=value"

    def sort(self, overrides: list[Override]) -> tuple[list[str], list[Override]]:
        """Separate choices of groups, as text for Hydra, from values."""
        choices = []
        values = []
        for override in self.effective(overrides):
            if not self._chooses(override):
                values.append(override)
                continue
            text = self._choice(override)
            if text:
                choices.append(text)
        return choices, values

    def effective(self, overrides: Sequence[Override]) -> list[Override]:
        """Return the overrides without those that a later one makes void: the last word wins.

        Hydra itself would apply all choices of groups before all values, so that an earlier value
        would win over a later choice; and a sweep would make a job of each value that is replaced.
        """
        kept = list[Override]()
        for override in overrides:
            kept = [earlier for earlier in kept if not self._makes_void(override, earlier)]
            kept.append(override)
        return kept

    def _makes_void(self, later: Override, earlier: Override) -> bool:
        if self._chooses(later):
            if later.is_add() and self._is_list(later):
                return False  # `+callbacks=ema`: one more choice, beside the earlier ones
            is_empty = later.is_delete() or later.value() in (None, [])
            if not is_empty or later.key_or_group in NEEDED:
                # `optimizer=adam` takes the place of `optimizer=sgd`, and of a node that was set
                # there; `optimizer.lr=1` stays, whichever optimizer it is for. A needed group
                # cannot be empty: that is a mistake, which is reported later.
                return _dotted_key(earlier) == _dotted_key(later)
        # `a.b=1` makes void what sets a.b, or only keys within it. `lr_scheduler=null` leaves no
        # place for values within the group.
        keys = _keys_set_by(later)
        return all(above(key, keys) for key in _keys_set_by(earlier))

    def _chooses(self, override: Override) -> bool:
        """Return whether an override chooses in a group; a dict would be a value of its key."""
        if any(isinstance(value, dict) for value in _values_given(override)):
            return False
        return bool(self.folders.is_group(override.key_or_group))

    def _is_list(self, override: Override) -> bool:
        """Return whether a group has a list of choices, to which `+group=x` adds one."""
        group = override.key_or_group
        return group not in self.has_choice() and group in self.folders.chosen

    def values_of(self, override: Override) -> list[SweepOverride]:
        """Return one override for each value that a sweep gives a key."""
        key = override.get_key_element()
        name = override.key_or_group
        text = str(override.input_line)
        given = text.partition("=")[2]
        if not override.is_sweep_override():
            return [SweepOverride(text, name, given, False)]
        if not override.is_discrete_sweep():
            self.note(name, "an interval has no end of values", "search it: -m sweep=optuna")
            return []
        try:
            values = [str(value) for value in override.sweep_string_iterator()]
        except Exception as error:
            self.note(name, first_lines(error))
            return []
        if not values:
            options = ", ".join(self.folders.options(name))
            self.note(name, f"{given} gives no value", f"choose of {options}" if options else None)
        return [SweepOverride(f"{key}={value}", name, value, True) for value in values]

    def dimension(self, override: Override) -> Dimension | None:
        """Return the values that a search may give a key; None if the override has only one."""
        if not override.is_sweep_override():
            return None
        key = override.get_key_element()
        name = override.key_or_group
        sweep: Any = override.value()
        text = str(override.input_line).partition("=")[2]
        integers = re.search(r"\d[.eE]|\d*\.\d", text) is None
        if override.is_interval_sweep():
            low = sweep.start
            high = sweep.end
            log = "log" in sweep.tags
            if not low < high:
                self.note(name, f"no numbers from {low} to {high}", "the lower end first")
            elif log and low <= 0:
                self.note(name, f"no logarithm of {low}: begin the interval above 0")
            return Dimension(key, low=low, high=high, integers=integers, log=log)
        choices = tuple(swept.value for swept in self.values_of(override))
        if not override.is_range_sweep() or len(choices) < 2:
            return Dimension(key, choices=choices)
        numbers = sorted(map(float, choices))
        step = abs(float(sweep.step))
        return Dimension(key, low=numbers[0], high=numbers[-1], integers=integers, step=step)

    def note(self, key: str, message: str, hint: str | None = None) -> None:
        """Add a mistake of the command line."""
        self.problems.append(Problem(key, message, hint, "command line"))

    def _elsewhere(self, group: str, name: str) -> str | None:
        """Return the option that finds a choice in another folder; None if no file has it."""
        for folder in self.folders.folders:
            path = Path(folder.path)
            if path.name == group.rpartition("/")[2] and os.path.isfile(path / f"{name}.yaml"):
                return f"name the folder of the groups: --config-dir {shown_path(path.parent)}"
        for place in ("conf", "configs", "config"):
            # Unlike Path.is_file, os.path.isfile takes a name that is too long for a file.
            if os.path.isfile(os.path.join(place, group, f"{name}.yaml")):
                return f"{place}/{group}/{name}.yaml is found with --config-dir {place}"
        return None

    def _choice(self, override: Override) -> str | None:
        """Return the override of a group as text for Hydra; None if it was refused."""
        group = override.key_or_group
        element = override.get_key_element().lstrip("+~")
        value: Any = None if override.is_delete() else override.value()
        problem = choice_problem(group, value)
        if override.is_delete() and override.value() is not None:
            self.note(
                group,
                f"{override.input_line} names a choice to leave out",
                f"~{element} leaves out the group, ~{element}.NAME one entry of it",
            )
            return None
        if problem:
            self.note(group, problem, self._options_of(group))
            return None
        if value is None:
            return f"{element}=[]"  # unlike `~group`, also of a group with a list of choices
        sign = "+" if override.is_add() and element not in self.has_choice() else ""
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or self.folders.find(f"{group}/{name}") is None:
                match = self._note_unknown_choice(group, str(name))
                return f"{sign}{element}={match}" if match else None
        if isinstance(value, str) and not override.is_add() and self._is_list(override):
            return f"{element}=[{value}]"  # to which a later `+group=x` can add
        return sign + str(override.input_line).lstrip("+")

    def _note_unknown_choice(self, group: str, name: str) -> str | None:
        """Note that a group has no such choice; return the nearest, to check the rest with it."""
        match = nearest(name, self.folders.options(group))
        hint = self._options_of(group)
        if match:
            hint = f"did you mean {match}? {hint}"
            self.guessed.add(group)
        self.note(group, f"there is no {group}={name}", self._elsewhere(group, name) or hint)
        return match

    def _options_of(self, group: str) -> str:
        return f"choose of {', '.join(self.folders.options(group))}"


def _with_decimal_point(text: str) -> str | None:
    """Return the number that was written with a decimal comma; None if it was none."""
    match = re.fullmatch(r"(.+=-?0),(\d+)", text)
    # Nobody sweeps over 0 and 001, or 0 and 5 of a rate; 16,32 are two values.
    return f"{match[1]}.{match[2]}" if match else None


def _values_given(override: Override) -> list[Any]:
    """Return the value of an override, or the values that it sweeps over as a list."""
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]


def _dotted_key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~").replace("/", ".")


def _keys_set_by(override: Override) -> set[str]:
    """Return the keys that an override sets: a section is merged, entry by entry."""
    keys = set[str]()
    for value in _values_given(override):
        for key, part in walk(value, _dotted_key(override)):
            if not isinstance(part, dict):
                keys.add(key)
    return keys


def _open_brackets(text: str) -> int:
    opened = text.count("[") + text.count("{")
    return opened - text.count("]") - text.count("}")


def _as_text(text: str) -> str | None:
    """Return how to quote a value that Hydra's grammar takes as text only, such as `run_dir=ü`.

    None if quotes would not help.
    """
    key, _, value = text.partition("=")
    if not value or value[0] in "[{'\"":  # the mistake is within a list, a mapping or a text
        return None
    text = f"{key}={quoted(value)}"
    try:
        OverridesParser.create().parse_override(text)
    except Exception:
        return None
    # Within double quotes, the shell replaces these characters.
    written = shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
    return f"quote it: {written}"


def choice_problem(group: str, value: Any) -> str | None:
    """Return why `value` cannot be chosen in a group, such as a list or null; None if it can."""
    if (value is None or value == []) and group in NEEDED:
        return "missing: every run needs one"
    if isinstance(value, list) and len(value) > 1 and group in SINGLE_CHOICE:
        return f"takes one choice, not {len(value)} ({', '.join(map(str, value))})"
    return None


def first_lines(error: BaseException) -> str:
    """Return an exception's message in one line, without Hydra's search path and URLs."""
    kept = []
    for line in str(error).partition("Config search path:")[0].splitlines():
        text = line.strip()
        if text and not text.startswith(("full_key:", "object_type=", "See http")):
            kept.append(text)
    return " ".join(kept)[:600] or type(error).__name__


def trains_the_same(key: str) -> bool:
    """Return whether a run whose value of a dotted key is changed trains the same."""
    return not affects_result(Config, key)


def identity(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides that identify a job, sorted by key, in one spelling.

    Overrides of the same key keep their order, in which they are applied. Raises ConfigError for a
    text that is not an override.
    """
    terms = sorted(map(_normalised, texts), key=itemgetter(0))
    return tuple(dict.fromkeys(text for key, text in terms if not belongs_outside(key)))


def belongs_outside(key: str) -> bool:
    """Return whether a key says where and how a job runs, and not what it trains.

    `dry_run` may vary between jobs: a dry run is another job than the training.
    """
    section = key.partition(".")[0]
    return section in START_KEYS and section != "dry_run"


def refuse_outside(varied: Iterable[str]) -> None:
    """Raise ConfigError for varied keys that do not affect what a job trains."""
    raise_problems(
        Problem(key, "cannot vary between the jobs of a sweep: it is the same for all of them")
        for key in varied
        if belongs_outside(key)
    )


def refuse_untyped(section: str, values: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Raise ConfigError for values of a section that files, not the overrides, have given it."""
    typed = dict[str, Any]()
    for text in texts:
        key = key_of(text)
        if key != section and not key.startswith(f"{section}."):
            continue
        value: Any = OverridesParser.create().parse_override(text).value()
        if key != section:
            typed[key.removeprefix(f"{section}.")] = value
        elif isinstance(value, dict):  # else the choice of a group
            typed |= value
    problems = []
    for name, value in values.items():
        if typed.get(name) != value:
            key = f"{section}.{name}"
            spelled = re.sub(r'"(\w+)": ', r"\1: ", json.dumps(value))
            problems.append(
                Problem(
                    key,
                    "comes from the command line only: it could run any program",
                    f"if you trust it: {shlex.quote(f'{key}={spelled}')}",
                )
            )
    raise_problems(problems)


@functools.cache
def _normalised(text: str) -> tuple[str, str]:
    """Return the key of an override, and the override in one spelling."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"not an override: {text}") from error
    element = override.get_key_element().lstrip("+")
    return element.lstrip("~"), f"{element}={override.get_value_element_as_str()}"
