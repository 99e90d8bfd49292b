"""Check a composed configuration against the schema, and list everything that is wrong with it."""

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar

from regimen.conf.errors import (
    MOST_PROBLEMS,
    Problem,
    did_you_mean,
    nearest,
    raise_problems,
    shortened,
)
from regimen.conf.fields import REQUIRED, Key, choices, declared, is_open, members
from regimen.conf.interpolation import children, is_related, join, walk
from regimen.conf.other_words import VALUES, our_key
from regimen.conf.python_words import in_python
from regimen.conf.schema import Config, Values
from regimen.conf.schema_trainer import StrategyConfig, TrainerConfig, strategy_node
from regimen.conf.yaml_file import format_scalar

MISSING = "???"
T = TypeVar("T")
_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}
_KINDS: dict[type, str] = {dict: " (section)", list: " (list)", str: " (text)"}
# Keys that every run needs take these values if they are left out to check the rest.
_EMPTY: Values = {"name": "", "model": {}, "data": {}, "task": {}, "optimizer": {}}
_FINITE = ("optimizer.", "lr_scheduler.")  # nodes in which infinity is no valid number


def check(raw: Values, schema: type = Config) -> list[Problem]:
    """List what is wrong with a resolved configuration; an empty list means that it is valid.

    At most MOST_PROBLEMS of each kind: the search for a similar name takes a while for each.
    """
    problems = list(islice(_section(raw, schema, ""), MOST_PROBLEMS))
    reported = {problem.key for problem in problems}
    for problem in islice(_invalid_values(raw), MOST_PROBLEMS):
        if problem.key not in reported:
            problems.append(problem)
    return problems


def check_options(options: TrainerConfig) -> list[Problem]:
    """List what is wrong with options made in Python, in Python's words, by the same checks.

    Hints on how to write YAML are left out.
    """
    values = dataclasses.asdict(options)
    seed = values.pop("seed")
    problems = check(values, TrainerConfig)
    problems += _value(seed, declared(Config)["seed"], "seed")
    translated = []
    for problem in problems:
        hint = problem.hint
        if hint is not None and not hint.startswith(("did you mean", "it is called")):
            hint = None
        translated.append(
            Problem(f"TrainerOptions.{problem.key}", in_python(problem.message), hint)
        )
    return translated


def parse(raw: Values) -> Config:
    """Turn a resolved configuration into the dataclasses; raises ConfigError with all mistakes."""
    return parsed(raw, Config)


def parsed(raw: Values, schema: type[T]) -> T:
    """Turn the values of a schema's keys into its object; raises ConfigError with all mistakes."""
    raise_problems(check(raw, schema))
    return _build(schema, raw)


def parse_sound(raw: Values, wrong: Iterable[str]) -> tuple[Config, list[Problem]]:
    """Return the configuration without its `wrong` keys, so that the rest can be checked.

    A section that every run needs is empty if it is wrong. Without the wrong keys, further mistakes
    may appear: these are left out as well, and returned.
    """
    raw = copy.deepcopy(raw)
    left_out = list(wrong)
    hidden = list[Problem]()
    while True:
        raw = {**copy.deepcopy(_EMPTY), **raw}
        found = []
        for problem in check(raw):
            section = problem.key.partition(".")[0]
            if raw.get(section) in ("", {}):  # left out before
                continue
            found.append(problem.key)
            if not is_related(problem.key, left_out):
                hidden.append(problem)
        if not found:
            return _build(Config, raw), hidden
        for key in found:
            drop(raw, key, around=True)
        left_out += found


def drop(raw: Values, key: str, around: bool = False) -> None:
    """Delete the value of a dotted key.

    `around`: if there is none, delete the section that should hold it.
    """
    name, _, rest = key.partition(".")
    inner = raw.get(name)
    if rest and isinstance(inner, dict) and (rest.partition(".")[0] in inner or not around):
        drop(inner, rest, around)
    else:
        raw.pop(name, None)


def _section(raw: Any, schema: type, key: str) -> Iterator[Problem]:
    """Yield the mistakes of a section: those of its keys, else those between its keys."""
    if not isinstance(raw, dict):
        yield Problem(key, f"expected a section of keys, got {format_value(raw)}")
        return
    describes = getattr(schema, "describes", None)
    if describes is not None and not describes(raw):
        return  # the signature of a user's class says what it takes
    keys = declared(schema)
    if describes is not None or not is_open(schema):
        for name in raw:
            is_target = describes is not None and name == "_target_"
            if name not in keys and not is_target:
                yield unknown(key, str(name), list(keys))
    problems = list[Problem]()
    for name, declaration in keys.items():
        if name in raw or declaration.default is REQUIRED:
            problems += _value(raw.get(name, MISSING), declaration, join(key, name))
    yield from problems
    if not problems and hasattr(schema, "conflicts"):
        section: Any = _build(schema, raw)
        for problem in section.conflicts():
            yield replace(problem, key=join(key, problem.key))


def _value(value: Any, declaration: Key, key: str) -> Iterator[Problem]:
    """Yield the mistakes of the value of a declared key, and of the values in it."""
    if value == MISSING:
        yield _missing(key, declaration)
        return
    if declaration.section is not None:
        if value is not None or not _is_of(declaration.type, None):
            yield from _section(value, declaration.section, key)
        return

    entry_type = _entry_type(declaration.type)
    nested = declaration.nested_schema
    if isinstance(value, dict) and entry_type is not Any and nested is None:
        for name, entry in children(value, key):
            yield from _value(entry, replace(declaration, type=entry_type), name)
        return

    if not _is_of(declaration.type, value):
        message = f"expected {describe_type(declaration)}, got {format_value(value)}"
        yield Problem(key, message, _hint(declaration, value, key))
        return
    expected = declaration.expects(value)
    if expected:
        yield Problem(key, f"expected {expected}, got {format_value(value)}")
    elif not isinstance(value, dict):
        return
    elif nested is StrategyConfig:
        yield from _section(strategy_node(value), nested, key)
    elif nested is not None:
        yield from _section(value, nested, key)
    elif declaration.named_nodes and value and "_target_" not in value:
        for name, entry in children(value, key):
            yield from _value(entry, replace(declaration, named_nodes=False, type=Values), name)
    elif declaration.node and "_target_" not in value:
        yield Problem(join(key, "_target_"), "missing: the path of a class or function")


def _entry_type(annotation: Any) -> Any:
    """Return the type of the values of a dict; Any for a type that is no dict."""
    for member in members(annotation):
        if typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    return Any


def _invalid_values(raw: Any) -> Iterator[Problem]:
    """Yield the values that no key may hold: ???, NaN, numbers beyond a tensor's, strange names."""
    for key, value in walk(raw):
        if isinstance(value, dict):
            for name in value:
                if re.search(r"^\.|[/\\]", str(name)) or not str(name).isprintable():
                    # Such as the name of a callback, which is part of the names of its files.
                    yield Problem(join(key, name), "a name is a plain word, without / and ..")
        if value == MISSING:
            yield _missing(key, Key())
        elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            # YAML cannot hold it: `config.yaml` could not be read again.
            yield Problem(key, f"expected text in UTF-8, got {format_value(value)}")
        elif type(value) is int and not -(2**63) <= value < 2**63:
            yield Problem(key, f"expected an integer of at most 64 bits, got {format_value(value)}")
        elif isinstance(value, float) and math.isnan(value):
            yield Problem(key, "expected a number, got nan")
        elif isinstance(value, float) and math.isinf(value) and key.startswith(_FINITE):
            yield Problem(key, f"expected a finite number, got {format_value(value)}")


def _missing(key: str, declaration: Key) -> Problem:
    meaning = f" ({declaration.doc})" if declaration.doc else ""
    return Problem(key, f"missing a value{meaning}", f"give it as {key}=...")


def unknown(section: str, name: str, known: list[str]) -> Problem:
    """Return the mistake that a section has no such name; `known`: the names that it has."""
    key = join(section, name)
    before_dot, dot, behind_dot = name.partition(".")
    if ours := our_key(key):
        hint = f"it is called {ours} here"
    elif match := nearest(name, known):
        hint = f"did you mean {join(section, match)}?"
    elif dot and before_dot in known:
        hint = f"a dot does not nest in YAML: write {before_dot}: {{{behind_dot}: ...}}"
    elif section:
        hint = f"{section} has {', '.join(known)}"
    else:
        hint = f"there are {', '.join(known)}"
    return Problem(key, "unknown key", hint)


def _is_of(annotation: Any, value: Any) -> bool:
    """Return whether a value is of a declared type. An integer passes as a float, a bool never."""
    if annotation is Any:
        return True
    kinds = members(annotation)
    if len(kinds) > 1:
        return any(_is_of(kind, value) for kind in kinds)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is_of(arguments[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            return False
        key_type, entry_type = arguments
        return all(_is_of(key_type, k) and _is_of(entry_type, v) for k, v in value.items())
    if annotation is float and type(value) is int:
        return True
    return type(value) is (annotation or type(None))


def describe_type(declaration: Key) -> str:
    """Return in words what a key takes."""
    parts = list[str]()
    for member in members(declaration.type):
        origin = typing.get_origin(member)
        arguments = typing.get_args(member)
        if origin is Literal:
            parts += map(str, arguments)
        elif origin is list:
            parts.append(f"a list, each item {describe_type(Key(type=arguments[0]))}")
        elif origin is dict:
            parts.append("a section of keys")
        else:
            parts.append(_NAMES.get(member, str(member)))
    text = " or ".join(parts) if len(parts) < 3 else f"one of {', '.join(parts)}"
    return f"{text} ({declaration.limit})" if declaration.limit else text


def _hint(declaration: Key, value: Any, key: str) -> str | None:
    """Return the way out of a value of another type; None if none is known."""
    kinds = members(declaration.type)
    if declaration.hint is not None:
        return declaration.hint
    if isinstance(value, bool) and str in kinds:
        return "YAML reads yes, no, on and off as true and false: quote the word"
    if isinstance(value, list) and value and _is_of(declaration.type, value[0]):
        return f"several jobs: -m {key}={','.join(map(str, value))}, without brackets"
    if isinstance(value, int | float) and str in kinds:
        return "quote it if it is text: \"'...'\" on the command line"
    if not isinstance(value, str):
        return None
    names = [str(choice) for choice in choices(declaration.type)]
    if VALUES.get(value) in names:
        return f"it is called {VALUES[value]} here"
    return did_you_mean(value, names)


def _build(schema: type[T], raw: Values) -> T:
    """Return the object of a section whose values are valid, and in it those of its sections."""
    keys = declared(schema)
    values = {}
    extra = {}
    for name, value in raw.items():
        if name not in keys:
            extra[name] = value
            continue
        section = keys[name].section
        values[name] = value if section is None or value is None else _build(section, value)
    if is_open(schema):
        values["extra"] = extra
    return schema(**values)


def format_value(value: Any) -> str:
    """Return a value of a configuration for a message, in brief and with its type."""
    if value is None or isinstance(value, bool):
        return format_scalar(value)
    return shortened(repr(value), 80) + _KINDS.get(type(value), "")


def with_defaults(raw: Values, schema: type = Config) -> Values:
    """Return a composed configuration with every key of ours, in the schema's order."""
    filled = {}
    for name, one in declared(schema).items():
        default = {} if dataclasses.is_dataclass(one.default) else copy.copy(one.default)
        given = raw.get(name, default)
        if one.section is not None and isinstance(given, dict):
            filled[name] = with_defaults(given, one.section)
        elif one.nested_schema is StrategyConfig and isinstance(given, dict):
            filled[name] = strategy_node(given)
        elif name in raw or given is not REQUIRED:
            filled[name] = given
    return {**filled, **raw, **filled}  # in this order, with these values
