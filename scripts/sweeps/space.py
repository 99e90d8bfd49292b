"""The space of a search: which keys vary, and between which values."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from callbacks.trial import import_optuna
from conf.errors import ConfigError, Problem, did_you_mean, raise_problems
from scripts.cli.arguments import Arguments
from scripts.composition.compose import split_search
from scripts.composition.overrides import Dimension, Swept

_MOST_SAMPLES = 100  # combinations that are checked before a search
_WORDS = ("values", "step")  # of an entry of `sweep.params`


def given(
    arguments: Arguments, params: Mapping[str, Any], replaced: Collection[str]
) -> list[Dimension]:
    """Return the dimensions of `sweep.params`, but for those that the command line has replaced.

    An entry is `interval(0,1)` or {values: "interval(0,1)", step: 0.5}. Raises ConfigError.
    """
    problems, dimensions = [], []
    for key, entry in params.items():
        place = f"sweep.params.{key}"
        words = entry if isinstance(entry, dict) else {"values": entry}
        for word in words.keys() - {*_WORDS}:
            hint = did_you_mean(str(word), _WORDS) or f"there are {', '.join(_WORDS)}"
            problems.append(Problem(f"{place}.{word}", "unknown key", hint))
        if "values" not in words:
            hint = "such as interval(0.01,0.1)"
            problems.append(Problem(f"{place}.values", "missing a value", hint))
        elif key.lstrip("+") not in replaced:
            text = f"{key}={words['values']}"
            _, found = split_search(replace(arguments, overrides=(text,)))
            if not found:
                hint = "use key=value outside of it"
                problems.append(Problem("sweep.params", f"{text}: gives one value only", hint))
            elif "step" in words:
                found = [_in_steps(found[0], words["step"], problems)]
            dimensions += found
    raise_problems(problems)
    return dimensions


def _in_steps(dimension: Dimension, step: Any, problems: list[Problem]) -> Dimension:
    room = dimension.high - dimension.low
    number = isinstance(step, int | float) and not isinstance(step, bool)
    if dimension.choices or dimension.log or not number or not 0 < step <= room:
        message = f"{step!r} does not fit: it takes a number, between the ends of interval(a,b)"
        problems.append(Problem(f"sweep.params.{dimension.key}.step", message))
        return dimension
    high = dimension.low + math.floor(room / step + 1e-9) * step
    whole = dimension.integers and isinstance(step, int)
    return replace(dimension, step=step, high=high, integers=whole)


def with_integers(dimension: Dimension, config: Mapping[str, Any]) -> Dimension:
    """Let a dimension have integers only where the configuration holds one, too."""
    value: Any = config
    for name in dimension.name.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return replace(dimension, integers=dimension.integers and type(value) is int)


def values_of(dimension: Dimension) -> list[Any]:
    """Return all values of a dimension. Raises ConfigError for an interval without a step."""
    if dimension.choices:
        return list(dimension.choices)
    if dimension.step is None and not dimension.integers:
        message = "sampler=grid takes choices, or numbers with a step"
        raise ConfigError(Problem(dimension.name, message, "sampler=tpe"))
    step, kind = dimension.step or 1, int if dimension.integers else float
    count = round((dimension.high - dimension.low) / step) + 1
    return [kind(dimension.low + n * step) for n in range(count)]


def samples(space: Sequence[Dimension]) -> list[tuple[Swept, ...]]:
    """Return values for a check of the space before the search.

    All combinations of the choices if there are at most 100, else each choice once. Of a range of
    numbers, the lowest and the highest.
    """
    lists: list[Sequence[Any]] = []
    for d in space:
        kind = int if d.integers else float
        lists.append(d.choices or tuple(dict.fromkeys((kind(d.low), kind(d.high)))))
    if math.prod(map(len, lists)) <= _MOST_SAMPLES:
        found = list(itertools.product(*lists))
    else:
        longest = max(map(len, lists))
        found = [tuple(values[n % len(values)] for values in lists) for n in range(longest)]
    return [tuple(map(swept, space, values)) for values in found]


def swept(dimension: Dimension, value: Any) -> Swept:
    """Return the override that gives a dimension a value."""
    return Swept(f"{dimension.key}={value}", dimension.name, str(value), True)


def enqueued(
    space: Sequence[Dimension], enqueue: Sequence[Mapping[str, Any]], whole: bool
) -> list[dict[str, Any]]:
    """Return `sweep.enqueue` as values of the dimensions; `whole`: each gives all keys.

    Raises ConfigError.
    """
    known = {d.name: d for d in space}
    problems, entries = [], []
    for number, entry in enumerate(enqueue):
        place = f"sweep.enqueue.{number}"
        entries.append(dict(entry))
        for key, value in entry.items():
            if (d := known.get(key)) is None:
                hint = did_you_mean(key, list(known)) or f"there are {', '.join(known)}"
                problems.append(Problem(f"{place}.{key}", "does not vary in this search", hint))
            elif d.choices:
                spelled = {_spelled(choice): choice for choice in d.choices}
                entries[number][key] = spelled.get(_spelled(value))
                if _spelled(value) not in spelled:
                    message = f"{value} is none of {', '.join(d.choices)}"
                    problems.append(Problem(f"{place}.{key}", message))
            elif not isinstance(value, int if d.integers else int | float) or not (
                d.low <= value <= d.high
            ):
                kind = "integer" if d.integers else "number"
                message = f"{value} is no {kind} between {d.low} and {d.high}"
                problems.append(Problem(f"{place}.{key}", message))
        if whole and (missing := [key for key in known if key not in entry]):
            problems.append(Problem(place, f"sampler=grid needs {', '.join(missing)} as well"))
    raise_problems(problems)
    return entries


def _spelled(value: Any) -> str:
    # As YAML understands it: `true` and `True` are one.
    try:
        return str(yaml.safe_load(str(value)))
    except yaml.YAMLError:
        return str(value)


def distribution(dimension: Dimension) -> Any:
    """Return a dimension as Optuna names it."""
    kinds = import_optuna().distributions
    low, high, log = dimension.low, dimension.high, dimension.log
    if dimension.choices:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.integers:
        return kinds.IntDistribution(int(low), int(high), log=log, step=int(dimension.step or 1))
    return kinds.FloatDistribution(low, high, log=log, step=dimension.step)
