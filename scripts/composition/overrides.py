"""The overrides of a command line: parsed one by one, checked and sorted.

Hydra's parsed overrides are duck-typed here, so that this module does not import Hydra.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from conf.errors import Problem, nearest
from scripts.composition.trees import first_lines

# Groups whose options are whole nodes or settings: merging two of them makes no sense.
SINGLE_CHOICE = (
    "model",
    "data",
    "loader",
    "loader/sampler",
    "loader/batch_sampler",
    "task",
    "optimizer",
    "lr_scheduler",
    "lr_scheduler/warmup",
    "trainer",
    "strategy",
    "sweep",
)
# Groups that every run needs: they cannot be deleted.
NEEDED = ("model", "data", "loader", "task", "optimizer", "trainer", "strategy")
_LONGEST = 255  # bytes of a key, which Hydra looks for among the names of folders
NO_HYDRA = "Hydra's own keys cannot be set: Regimen does not run Hydra's jobs"
_INSTEAD = {"run.dir": "run_dir=DIR", "sweep.dir": "run_dir=DIR", "searchpath": "--config-dir DIR"}


class ConfigGroups(Protocol):
    """What `Overrides` needs to know about the folders of configs."""

    def group_exists(self, config_path: str) -> bool: ...
    def config_exists(self, config_path: str) -> bool: ...
    def get_group_options(self, group_name: str) -> list[str]: ...
    def get_sources(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Swept:
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
    when: tuple[tuple[str, tuple[str, ...]], ...] = ()  # keys, and which values each must have

    @property
    def name(self) -> str:
        """The key without signs."""
        return self.key.lstrip("+")


@dataclass(slots=True)
class Overrides:
    """The overrides of a composition, and their problems."""

    groups: ConfigGroups
    problems: list[Problem] = field(default_factory=list)

    def parse(self, texts: Iterable[str], parse: Callable[[str], Any], sweep: bool) -> list[Any]:
        """Parse each text, collecting all mistakes."""
        parsed = []
        for text in texts:
            try:
                override = parse(text)
            except Exception as error:  # of the grammar, or an internal one of the parser
                reason = first_lines(error).removeprefix("LexerNoViableAltException: ")
                way = "write $HOME for ~, or quote the text" if "=~" in text else None
                self.note(text, f"not an override: {reason}", way or _as_text(text, parse))
                continue
            if not override.key_or_group:
                self.note(text, "not an override: there is no key before the equals sign")
                continue
            if len(override.key_or_group.encode()) > _LONGEST:
                self.note(f"{text[:40]}...", f"longer than {_LONGEST} bytes")
                continue
            if self._allowed(override, text, sweep):
                parsed.append(override)
        return parsed

    def sort(
        self, overrides: list[Any], known: Callable[[], set[str]]
    ) -> tuple[list[str], list[Any]]:
        """Separate choices of groups, as text for Hydra, from values.

        `known` returns the groups that have a choice already, which `+` cannot add.
        """
        choices, values = [], []
        for override in overrides:
            value = override.value()
            if isinstance(value, dict) or not self.groups.group_exists(override.key_or_group):
                values.append(override)
            elif (text := self._choice(override, value, known)) is not None:
                choices.append(text)
        return choices, values

    def values_of(self, override: Any) -> list[Swept]:
        """Return one override for each value that a sweep gives a key."""
        key, text, name = override.get_key_element(), override.input_line, override.key_or_group
        if not override.is_sweep_override():
            return [Swept(text, name, text.partition("=")[2], False)]
        if not override.is_discrete_sweep():
            self.note(name, "an interval has no end of values", "search it: -m sweep=optuna")
            return []
        try:
            values = [str(value) for value in override.sweep_string_iterator()]
        except Exception as error:
            self.note(name, first_lines(error))
            return []
        if not values:
            options = self._options(name) if self.groups.group_exists(name) else []
            hint = f"choose of {', '.join(options)}" if options else None
            self.note(name, f"{text.partition('=')[2]} gives no value", hint)
        return [Swept(f"{key}={value}", name, value, True) for value in values]

    def dimension(self, override: Any) -> Dimension | None:
        """Return the values that a search may give a key; None if the override has only one."""
        if not override.is_sweep_override():
            return None
        key = override.get_key_element()
        if not override.is_interval_sweep():
            choices = tuple(swept.value for swept in self.values_of(override))
            if not override.is_range_sweep() or len(choices) < 2:
                return Dimension(key, choices=choices)
            numbers = sorted(map(float, choices))
            whole = all(re.fullmatch(r"-?\d+", choice) for choice in choices)
            step = abs(float(override.value().step))
            return Dimension(key, low=numbers[0], high=numbers[-1], integers=whole, step=step)
        sweep = override.value()
        low, high, log = sweep.start, sweep.end, "log" in sweep.tags
        if not low < high:
            self.note(
                override.key_or_group, f"no numbers from {low} to {high}", "the lower end first"
            )
        elif log and low <= 0:
            self.note(override.key_or_group, f"no logarithm of {low}: begin the interval above 0")
        integers = re.search(r"\d[.e]|\d*\.\d", override.input_line.partition("=")[2]) is None
        return Dimension(key, low=low, high=high, integers=integers, log=log)

    def note(self, key: str, message: str, hint: str | None = None) -> None:
        """Add a mistake of the command line."""
        self.problems.append(Problem(key, message, hint, "command line"))

    def _allowed(self, override: Any, text: str, sweep: bool) -> bool:
        key = override.key_or_group
        if re.match(r"hydra([./@]|$)", key) or (override.package or "").startswith("hydra"):
            instead = _INSTEAD.get(key.removeprefix("hydra."))
            self.note(key, NO_HYDRA, f"use {instead}" if instead else None)
        elif override.is_sweep_override() and not sweep:
            hint = f"-m sweeps over them; {key}=[...] is a list; \"{key}='...'\" is text"
            self.note(key, f"several values in {text!r}", hint)
        else:
            return True
        return False

    def _choice(self, override: Any, value: Any, known: Callable[[], set[str]]) -> str | None:
        """Return the override of a group as text for Hydra; None if it was refused."""
        group = override.key_or_group
        element = override.get_key_element().lstrip("+~")
        if problem := choice_problem(group, None if override.is_delete() else value):
            self.note(group, problem, f"choose of {', '.join(self._options(group))}")
            return None
        if override.is_delete() or value is None:
            return f"~{element}"
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or not self.groups.config_exists(f"{group}/{name}"):
                options = self._options(group)
                near = nearest(str(name), options)
                meant = f"did you mean {near}? " if near else ""
                if (beside := _beside(group, str(name))) is not None:
                    meant = f"{beside} is read with --config-dir {Path(beside).parts[0]}; "
                if self._other_ending(group, str(name)):
                    meant = f"its file must be called {name}.yaml; "
                hint = f"{meant}choose of {', '.join(options)}"
                self.note(group, f"there is no {group}={name}", hint)
                return None
        added = override.is_add() and element not in known()
        return ("+" if added else "") + str(override.input_line).lstrip("+")

    def _options(self, group: str) -> list[str]:
        return self.groups.get_group_options(group)

    def _other_ending(self, group: str, name: str) -> bool:
        paths = [Path(str(one.path), group, f"{name}.yml") for one in self.groups.get_sources()]
        return any(".." not in path.parts and path.is_file() for path in paths)


def _beside(group: str, name: str) -> str | None:
    """Return the file of a choice in a folder of configs beside the start, if it is there."""
    for folder in ("conf", "configs", "config"):
        path = Path(folder, group, f"{name}.yaml")
        if ".." not in path.parts and path.is_file():
            return str(path)
    return None


def _as_text(text: str, parse: Callable[[str], Any]) -> str | None:
    """Return how to write a value that Hydra's grammar takes as text only, such as `run_dir=ü`."""
    key, _, value = text.partition("=")
    if not value or value[0] in "[{'\"":  # the mistake is within a list, a mapping or a text
        return None
    quoted = "{}='{}'".format(key, value.replace("'", r"\'"))
    try:
        parse(quoted)
    except Exception:
        return None
    plain = re.search(r'["$`\\!]', quoted) is None
    as_typed = f'"{quoted}"' if plain else shlex.quote(quoted)
    return f"quote it: {as_typed}"


def choice_problem(group: str, value: Any) -> str | None:
    """Return why `value` cannot be chosen in a group, such as a list or null; None if it can."""
    if (value is None or value == []) and group in NEEDED:
        return "missing: every run needs one"
    if isinstance(value, list) and len(value) > 1 and group in SINGLE_CHOICE:
        return f"takes one choice, not {len(value)} ({', '.join(map(str, value))})"
    return None
