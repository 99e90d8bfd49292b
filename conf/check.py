"""Hold a composed configuration against the schema, and list everything that is wrong with it."""

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar

from regimen.conf.errors import MOST_PROBLEMS, Problem, did_you_mean, nearest, raise_problems
from regimen.conf.fields import REQUIRED, Key, choices, declared, is_open, members
from regimen.conf.interpolation import children, is_related, join, walk
from regimen.conf.other_words import VALUES, our_key
from regimen.conf.python_words import in_python
from regimen.conf.schema import Config, Values
from regimen.conf.schema_trainer import StrategyConfig, TrainerConfig, strategy_node
from regimen.conf.yaml_file import word

MISSING = "???"
T = TypeVar("T")
_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
# What every run needs, where it is left out of a configuration whose rest is checked.
_EMPTY: Values = {"name": "", "model": {}, "data": {}, "task": {}, "optimizer": {}}
_FINITE = ("optimizer.", "lr_scheduler.")  # nodes whose numbers are hyper-parameters


def check(raw: Values, schema: type = Config) -> list[Problem]:
    """List what is wrong with a resolved configuration; an empty list means nothing.

    Of thousands of mistakes the first ones: to find what was meant takes a while for each.
    """
    found = list(islice(_section(raw, schema, ""), MOST_PROBLEMS))
    keys = {problem.key for problem in found}
    others = islice(_everywhere(raw), MOST_PROBLEMS)
    return found + [problem for problem in others if problem.key not in keys]


def check_options(options: TrainerConfig) -> list[Problem]:
    """List what is wrong with options that were made in Python: by the same checks, in its words.

    A hint on how to write YAML is left out.
    """
    values = dataclasses.asdict(options)
    seed = values.pop("seed")
    found = [
        *check(values, TrainerConfig),
        *_value(seed, declared(Config)["seed"], "seed"),
    ]
    told = []
    for problem in found:
        hint = problem.hint
        if hint is not None and not hint.startswith(("did you mean", "it is called")):
            hint = None
        told.append(Problem(f"TrainerOptions.{problem.key}", in_python(problem.message), hint))
    return told


def parse(raw: Values) -> Config:
    """Turn a resolved configuration into the dataclasses; raises ConfigError with all mistakes."""
    return parsed(raw, Config)


def parsed(raw: Values, schema: type[T]) -> T:
    """Turn the values of a schema's keys into its object; raises ConfigError with all mistakes."""
    raise_problems(check(raw, schema))
    return _built(schema, raw)


def parse_sound(raw: Values, wrong: Iterable[str]) -> tuple[Config, list[Problem]]:
    """Return a configuration without keys that are `wrong`, so that the rest can be checked.

    What is wrong without them is left out as well, and returned: what their mistakes had hidden. A
    section that every run needs is empty where it is left out.
    """
    raw = copy.deepcopy(raw)
    known, hidden = list(wrong), list[Problem]()
    found = None
    while found is None or found:
        raw = {**copy.deepcopy(_EMPTY), **raw}
        found = []
        for problem in check(raw):
            section = problem.key.partition(".")[0]
            if raw.get(section) in ("", {}):  # left out before
                continue
            found.append(problem.key)
            if not is_related(problem.key, known):
                hidden.append(problem)
        for key in found:
            drop(raw, key, around=True)
        known += found
    return _built(Config, raw), hidden


def drop(raw: Values, key: str, around: bool = False) -> None:
    """Delete what stands at a key; if nothing does, with `around` the section around it."""
    name, _, rest = key.partition(".")
    inner = raw.get(name)
    if rest and isinstance(inner, dict) and (rest.partition(".")[0] in inner or not around):
        drop(inner, rest, around)
    else:
        raw.pop(name, None)


def _section(raw: Any, schema: type, key: str) -> Iterator[Problem]:
    if not isinstance(raw, dict):
        yield Problem(key, f"expected a section of keys, got {format_value(raw)}")
        return
    describes = getattr(schema, "describes", None)
    if describes is not None and not describes(raw):
        return  # a class of the user's: its signature says what it takes
    known, inner = declared(schema), list[Problem]()
    if describes is not None or not is_open(schema):
        names = [*known] if describes is None else [*known, "_target_"]
        yield from (unknown(key, str(n), list(known)) for n in raw if n not in names)
    for name, one in known.items():
        if name in raw or one.default is REQUIRED:
            inner += _value(raw.get(name, MISSING), one, join(key, name))
    yield from inner
    if not inner and hasattr(schema, "conflicts"):
        built: Any = _built(schema, raw)
        for problem in built.conflicts():
            yield replace(problem, key=join(key, problem.key))


def _value(value: Any, one: Key, key: str) -> Iterator[Problem]:
    dicts = (typing.get_args(m) for m in members(one.type) if typing.get_origin(m) is dict)
    _, child = next(dicts, (str, Any))
    if value == MISSING:
        yield _missing(key, one)
    elif one.section is not None and not (value is None and _takes(one.type, None)):
        yield from _section(value, one.section, key)
    elif isinstance(value, dict) and child is not Any and one.nested_schema is None:
        for here, inner in children(value, key):
            yield from _value(inner, replace(one, type=child), here)
    elif not _takes(one.type, value):
        yield Problem(
            key, f"expected {describe_type(one)}, got {format_value(value)}", _hint(one, value, key)
        )
    elif limit := one.expects(value):
        yield Problem(key, f"expected {limit}, got {format_value(value)}")
    elif isinstance(value, dict) and one.nested_schema is not None:
        yield from _section(value, one.nested_schema, key)
    elif isinstance(value, dict) and one.named_nodes and value and "_target_" not in value:
        for here, inner in children(value, key):
            yield from _value(inner, replace(one, named_nodes=False, type=Values), here)
    elif isinstance(value, dict) and one.node and "_target_" not in value:
        yield Problem(join(key, "_target_"), "missing: the path of a class or function")


def _everywhere(raw: Any) -> Iterator[Problem]:
    """Find values that no key may hold: what was left open, NaN, numbers that no tensor holds."""
    for key, node in walk(raw):
        for name in node if isinstance(node, dict) else ():
            if re.search(r"^\.|[/\\]", str(name)) or not str(name).isprintable():
                # A callback's name, for one, is part of the names of its files.
                yield Problem(join(key, name), "a name is a plain word, without / and ..")
        if node == MISSING:
            yield _missing(key, Key())
        elif isinstance(node, str) and re.search("[\ud800-\udfff]", node):
            # YAML cannot hold it: `config.yaml` could not be read again.
            yield Problem(key, f"expected text in UTF-8, got {format_value(node)}")
        elif type(node) is int and not -(2**63) <= node < 2**63:
            yield Problem(key, f"expected an integer of at most 64 bits, got {format_value(node)}")
        elif isinstance(node, float) and math.isnan(node):
            yield Problem(key, "expected a number, got nan")
        elif isinstance(node, float) and math.isinf(node) and key.startswith(_FINITE):
            yield Problem(key, f"expected a finite number, got {format_value(node)}")


def _missing(key: str, one: Key) -> Problem:
    meaning = f" ({one.doc})" if one.doc else ""
    return Problem(key, f"missing a value{meaning}", f"give it as {key}=...")


def unknown(section: str, name: str, known: list[str]) -> Problem:
    """Return the mistake that a section, which has the `known` names, does not have another."""
    first, dot, rest = name.partition(".")
    if ours := our_key(join(section, name)):
        hint = f"it is called {ours} here"
    elif near := nearest(name, known):
        hint = f"did you mean {join(section, near)}?"
    elif dot and first in known:
        hint = f"a dot does not nest in YAML: write {first}: {{{rest}: ...}}"
    else:
        hint = f"{f'{section} has' if section else 'there are'} {', '.join(known)}"
    return Problem(join(section, name), "unknown key", hint)


def _takes(annotation: Any, value: Any) -> bool:
    """Return whether a value is of a declared type; an integer passes as a float, a bool never."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if len(kinds := members(annotation)) > 1:
        return any(_takes(kind, value) for kind in kinds)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin is list:
        return isinstance(value, list) and all(_takes(args[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _takes(args[0], name) and _takes(args[1], item) for name, item in value.items()
        )
    return type(value) is (annotation or type(None)) or (annotation is float and type(value) is int)


def describe_type(one: Key) -> str:
    """Spell what a key takes, for people."""
    parts = list[str]()
    for member in members(one.type):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            parts += map(str, args)
        elif origin is list:
            parts.append(f"a list, each item {describe_type(Key(type=args[0]))}")
        elif origin is dict:
            parts.append("a section of keys")
        else:
            parts.append("null" if member is type(None) else _NAMES.get(member, str(member)))
    text = " or ".join(parts) if len(parts) < 3 else f"one of {', '.join(parts)}"
    return f"{text} ({one.limit})" if one.limit else text


def _hint(one: Key, value: Any, key: str) -> str | None:
    kinds, named = members(one.type), [*map(str, choices(one.type))]
    if isinstance(value, bool) and not {int, float, bool} & set(kinds):
        return "YAML reads yes, no, on and off as true and false: quote the word"
    if isinstance(value, list) and value and _takes(one.type, value[0]):
        return f"several jobs: -m {key}={','.join(map(str, value))}, without brackets"
    if str in kinds and isinstance(value, int | float):
        return "quote it if it is text: \"'...'\" on the command line"
    if isinstance(value, str):
        ours = VALUES.get(value)
        return f"it is called {ours} here" if ours in named else did_you_mean(value, named)
    return None


def _built(schema: type[T], raw: Values) -> T:
    """Return the object of a section whose values fit, with those of the sections in it."""
    known = declared(schema)
    values = {name: value for name, value in raw.items() if name in known}
    for name, value in values.items():
        if value is not None and (section := known[name].section):
            values[name] = _built(section, value)
    if is_open(schema):
        values["extra"] = {name: value for name, value in raw.items() if name not in known}
    return schema(**values)


def format_value(value: Any) -> str:
    """Spell a value of a configuration for a message, briefly and with its type."""
    if value is None or isinstance(value, bool):
        return word(value)
    kinds: dict[type, str] = {dict: " (section)", list: " (list)", str: " (text)"}
    text = repr(value)
    return (text if len(text) <= 80 else f"{text[:77]}...") + kinds.get(type(value), "")


def with_defaults(raw: Values, schema: type = Config) -> Values:
    """Return a composed configuration with every key of ours, in the schema's order."""
    filled = {}
    for name, one in declared(schema).items():
        default = {} if dataclasses.is_dataclass(one.default) else copy.copy(one.default)
        given = raw.get(name, default)
        if one.section is not None and isinstance(given, dict):
            filled[name] = with_defaults(given, one.section)
        elif one.words is StrategyConfig and isinstance(given, dict):
            filled[name] = strategy_node(given)
        elif name in raw or given is not REQUIRED:
            filled[name] = given
    return {**filled, **raw, **filled}  # in this order, with these values
