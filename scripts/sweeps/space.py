"""The space of a search: which keys vary, between which values, and under which conditions."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from conf.errors import Problem, did_you_mean, raise_problems
from scripts.cli.arguments import Arguments
from scripts.composition.compose import Composed, compose, split_search
from scripts.composition.overrides import Dimension, Swept

_MOST_SAMPLES = 100  # combinations that are checked before a search
_WORDS = ("values", "step", "when")  # of an entry of `sweep.params`


def given(arguments: Arguments, params: Mapping[str, Any], known: Iterable[str]) -> list[Dimension]:
    """Read the dimensions of `sweep.params` that the command line does not replace.

    Raises ConfigError.
    """
    entries = {
        key: entry if isinstance(entry, dict) else {"values": entry}
        for key, entry in params.items()
        if key.lstrip("+") not in known
    }
    raise_problems(p for key, entry in entries.items() for p in _entry_problems(key, entry))
    texts = tuple(f"{key}={entry['values']}" for key, entry in entries.items())
    fixed, space = split_search(replace(arguments, overrides=texts))
    raise_problems(
        Problem("sweep.params", f"{text}: gives one value only", hint="use key=value outside of it")
        for text in fixed
    )
    return [_with_entry(d, entry) for d, entry in zip(space, entries.values(), strict=True)]


def _entry_problems(key: str, entry: Mapping[str, Any]) -> Iterable[Problem]:
    place = f"sweep.params.{key}"
    for word in entry:
        if word not in _WORDS:
            hint = did_you_mean(str(word), _WORDS) or f"there are {', '.join(_WORDS)}"
            yield Problem(f"{place}.{word}", "unknown key", hint)
    if "values" not in entry:
        yield Problem(f"{place}.values", "missing a value", "such as interval(0.01,0.1)")
    if not isinstance(entry.get("when", {}), dict):
        yield Problem(f"{place}.when", "expected a section of keys", "such as {model: mlp}")
    step = entry.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int | float)):
        yield Problem(f"{place}.step", f"expected a number, got {step!r}")


def _with_entry(dimension: Dimension, entry: Mapping[str, Any]) -> Dimension:
    when = tuple(
        (key, tuple(map(_spelled, value if isinstance(value, list) else [value])))
        for key, value in (entry.get("when") or {}).items()
    )
    dimension = replace(dimension, when=when)
    if (step := entry.get("step")) is None:
        return dimension
    place = f"sweep.params.{dimension.name}.step"
    if dimension.choices or dimension.log:
        wrong = "logarithmic" if dimension.log else "no interval"
        raise_problems([Problem(place, f"has no meaning where the values are {wrong}")])
    if not 0 < step <= dimension.high - dimension.low:
        raise_problems([Problem(place, f"{step} does not fit between the ends")])
    count = math.floor((dimension.high - dimension.low) / step + 1e-9)
    whole = dimension.integers and isinstance(step, int)
    return replace(dimension, step=step, high=dimension.low + count * step, integers=whole)


class Space:
    """The dimensions of a search, each after those that its condition depends on.

    Raises ConfigError for conditions on keys that do not exist, or that depend on each other.
    """

    def __init__(self, arguments: Arguments, fixed: Sequence[str], given: Sequence[Dimension]):
        self._fixed = fixed
        self._arguments = arguments
        self.composed = self._compose(())
        known = {d.name: d for d in given}
        raise_problems(
            Problem(f"sweep.params.{d.name}.when", f"there is no key {key!r}", _meant(key, known))
            for d in given
            for key, _ in d.when
            if key not in known and self._held(self.composed, key) is None
        )
        self.dimensions = [self._typed(d, known) for d in _ordered(given)]
        self.names = [d.name for d in self.dimensions]

    def active(self, dimension: Dimension, values: Mapping[str, Any]) -> bool:
        """Return whether a dimension varies in a job whose varied keys have these values."""
        names = {d.name for d in self.dimensions}
        return all(
            _spelled(values.get(key) if key in names else self._held(self.composed, key)) in allowed
            for key, allowed in dimension.when
        )

    def samples(self) -> list[tuple[Swept, ...]]:
        """Return values for a check of the space before the search.

        All combinations of the choices if there are at most 100, else each choice once. Of a range
        of numbers, the lowest and the highest.
        """
        lists = [[*values_of(d)] for d in self.dimensions]
        longest = max(map(len, lists))
        found = [tuple(values[n % len(values)] for values in lists) for n in range(longest)]
        if math.prod(map(len, lists)) <= _MOST_SAMPLES:
            found = list(itertools.product(*lists))
        return list(dict.fromkeys(map(self._job, found)))

    def _job(self, combination: Sequence[Any]) -> tuple[Swept, ...]:
        values: dict[str, Any] = {}
        for dimension, value in zip(self.dimensions, combination, strict=True):
            if self.active(dimension, values):
                values[dimension.name] = value
        return tuple(swept(d.key, values[d.name]) for d in self.dimensions if d.name in values)

    def grid(self) -> dict[str, list[Any]]:
        """Return all values of each key. Raises ConfigError for an interval without a step."""
        raise_problems(
            Problem(d.name, "sampler=grid takes choices, or numbers with a step", "sampler=tpe")
            for d in self.dimensions
            if not d.choices and d.step is None and not d.integers
        )
        return {d.name: list(_steps(d)) for d in self.dimensions}

    def size(self) -> int:
        """Return the number of combinations that a grid tries."""
        return math.prod(map(len, self.grid().values()))

    def entries(self, enqueue: Sequence[Mapping[str, Any]], whole: bool) -> list[dict[str, Any]]:
        """Return `sweep.enqueue` as values of the dimensions; `whole`: each gives all keys.

        Raises ConfigError.
        """
        known = {d.name: d for d in self.dimensions}
        problems, entries = [], []
        for number, entry in enumerate(enqueue):
            place = f"sweep.enqueue.{number}"
            for key, value in entry.items():
                if key not in known:
                    hint = did_you_mean(key, list(known)) or f"there are {', '.join(known)}"
                    problems.append(Problem(f"{place}.{key}", "does not vary in this search", hint))
                elif not _fits(known[key], value):
                    problems.append(Problem(f"{place}.{key}", f"{value} is {_outside(known[key])}"))
            if whole and (missing := [key for key in known if key not in entry]):
                problems.append(Problem(place, f"sampler=grid needs {', '.join(missing)} as well"))
            entries.append({k: _fitted(known[k], v) for k, v in entry.items() if k in known})
        raise_problems(problems)
        return entries

    def _typed(self, dimension: Dimension, known: Mapping[str, Dimension]) -> Dimension:
        """Let a dimension have integers only where the configuration holds one, too."""
        if dimension.choices or not dimension.integers:
            return dimension
        composed = self._compose(_conditions(dimension, known)) if dimension.when else self.composed
        return with_integers(dimension, composed.config)

    def _compose(self, more: Iterable[str]) -> Composed:
        overrides = (*self._fixed, *more)
        return compose(replace(self._arguments, overrides=overrides, multirun=False))

    def _held(self, composed: Composed, key: str) -> Any:
        """Return the fixed value of a key: the choice of a group, or a value."""
        return composed.choices.get(key) or held(composed.config, key)


def _conditions(dimension: Dimension, known: Mapping[str, Dimension]) -> list[str]:
    """Return overrides under which a dimension varies."""
    found: list[str] = []
    for key, allowed in dimension.when:
        if key in known:
            found += [*_conditions(known[key], known), f"{known[key].key}={allowed[0]}"]
    return found


def _ordered(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Return dimensions after those that they depend on, otherwise in their order."""
    left, ordered = list(dimensions), list[Dimension]()
    while left:
        waiting = {d.name for d in left}
        free = [d for d in left if not waiting & {key for key, _ in d.when}]
        if not free:
            names = ", ".join(sorted(waiting))
            raise_problems([Problem("sweep.params", f"the conditions of {names} form a circle")])
        ordered += free
        left = [d for d in left if d not in free]
    return ordered


def with_integers(dimension: Dimension, config: Mapping[str, Any]) -> Dimension:
    """Let a dimension have integers only where the configuration holds one, too."""
    value = held(config, dimension.name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return replace(dimension, integers=dimension.integers and whole)


def held(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def values_of(dimension: Dimension) -> Sequence[Any]:
    """Return the choices, or the ends of an interval."""
    if dimension.choices:
        return dimension.choices
    kind = int if dimension.integers else float
    return kind(dimension.low), kind(dimension.high)


def _steps(dimension: Dimension) -> Iterable[Any]:
    if dimension.choices:
        return dimension.choices
    step = dimension.step or 1
    count = round((dimension.high - dimension.low) / step) + 1
    kind = int if dimension.integers else float
    return [kind(dimension.low + n * step) for n in range(count)]


def swept(key: str, value: Any) -> Swept:
    """Return the override that gives a key a value."""
    return Swept(f"{key}={value}", key.lstrip("+"), str(value), True)


def _fits(dimension: Dimension, value: Any) -> bool:
    if dimension.choices:
        return _spelled(value) in map(_spelled, dimension.choices)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not dimension.low <= value <= dimension.high:
        return False
    steps = (value - dimension.low) / (dimension.step or (1 if dimension.integers else value or 1))
    return not (dimension.step or dimension.integers) or abs(steps - round(steps)) < 1e-9


def _fitted(dimension: Dimension, value: Any) -> Any:
    if dimension.choices:
        return next((c for c in dimension.choices if _spelled(c) == _spelled(value)), value)
    kind = int if dimension.integers else float
    return kind(value) if isinstance(value, int | float) else value


def _outside(dimension: Dimension) -> str:
    if dimension.choices:
        return f"none of {', '.join(dimension.choices)}"
    low, high = values_of(dimension)
    steps = f" in steps of {dimension.step:g}" if dimension.step else ""
    return f"not between {low} and {high}{steps}"


def _meant(key: str, known: Iterable[str]) -> str | None:
    return did_you_mean(key, list(known))


def _spelled(value: Any) -> str:
    """Spell a value as YAML understands it: `true` and `True` are one."""
    text = value if isinstance(value, str) else str(value)
    try:
        return str(yaml.safe_load(text))
    except yaml.YAMLError:
        return text
