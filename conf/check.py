"""Hold a composed configuration against the schema, and list everything that is wrong with it."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from conf.errors import ConfigError, Problem, did_you_mean, nearest
from conf.fields import REQUIRED, Rule, declared, default_of, is_open, rule_of
from conf.other_words import VALUES, our_key
from conf.schema import Config

MISSING = "???"
_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_ANY = Rule("")
_FINITE = ("optimizer.", "lr_scheduler.")  # nodes whose numbers are hyper-parameters


def check(raw: dict[str, Any]) -> list[Problem]:
    """List what is wrong with a resolved configuration; an empty list means nothing."""
    found = list(_section(raw, Config, ""))
    return found + [p for p in _everywhere(raw, "") if p.key not in {f.key for f in found}]


def parse(raw: dict[str, Any]) -> Config:
    """Turn a resolved configuration into the dataclasses; raises ConfigError with all mistakes."""
    problems = check(raw)
    if problems:
        raise ConfigError(problems)
    config: Config = _build(Config, raw)
    return config


def _section(raw: Any, schema: type, key: str) -> Iterator[Problem]:
    if not isinstance(raw, dict):
        yield Problem(key, f"expected a section of keys, got {shown(raw)}")
        return
    known = declared(schema)
    hints = typing.get_type_hints(schema)
    if not is_open(schema):
        yield from (_unknown(_join(key, n), n, list(known), key) for n in raw if n not in known)
    inner: list[Problem] = []
    for name, one in known.items():
        here = _join(key, name)
        if name not in raw:
            if default_of(one) is REQUIRED:
                inner.append(_missing(here, rule_of(one)))
        else:
            inner += _value(raw[name], hints[name], rule_of(one), here)
    yield from inner
    if not inner and hasattr(schema, "conflicts"):
        for problem in _build(schema, raw).conflicts():
            yield dataclasses.replace(problem, key=_join(key, problem.key))


def _value(value: Any, annotation: Any, rule: Rule, key: str) -> Iterator[Problem]:
    if value == MISSING:
        yield _missing(key, rule)
        return
    section = dataclass_in(annotation)
    named = next((m for m in _members(annotation) if _is_named(m)), None)
    if isinstance(value, dict) and named is not None and rule.words is None:
        for name, child in value.items():
            yield from _value(child, typing.get_args(named)[1], rule, _join(key, name))
        return
    if section is not None and not (value is None and _takes(annotation, None)):
        yield from _section(value, section, key)
    elif not _takes(annotation, value):
        hint = _type_hint(annotation, value)
        yield Problem(key, f"expected {spelled(annotation, rule)}, got {shown(value)}", hint=hint)
    elif (expected := rule.expects(value)) is not None:
        yield Problem(key, f"expected {expected}, got {shown(value)}")
    elif isinstance(value, dict):
        yield from _open_node(value, rule, key)


def _open_node(node: dict[str, Any], rule: Rule, key: str) -> Iterator[Problem]:
    if rule.node and "_target_" not in node:
        yield Problem(_join(key, "_target_"), "missing: the path of a class or function")
    if rule.words is not None:
        yield from _section(node, rule.words, key)
        for name, child in (node.get("optimizers") or {}).items():
            if isinstance(child, dict):
                yield from _section(child, rule.words, f"{key}.optimizers.{name}")


def _everywhere(node: Any, key: str) -> Iterator[Problem]:
    """Find values that no key may hold: what was left open, NaN, numbers that no tensor holds."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _everywhere(value, _join(key, str(name)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _everywhere(value, _join(key, str(index)))
    elif node == MISSING:
        yield _missing(key, _ANY)
    elif isinstance(node, float) and math.isnan(node):
        yield Problem(key, "expected a number, got nan")
    elif type(node) is int and not -(2**63) <= node < 2**63:
        yield Problem(key, f"expected an integer of at most 64 bits, got {shown(node)}")
    elif isinstance(node, float) and math.isinf(node) and key.startswith(_FINITE):
        yield Problem(key, f"expected a finite number, got {shown(node)}")


def _missing(key: str, rule: Rule) -> Problem:
    meaning = f" ({rule.doc})" if rule.doc else ""
    return Problem(key, f"missing a value{meaning}", hint=f"give it as {key}=...")


def _unknown(key: str, name: Any, known: list[str], section: str) -> Problem:
    near = nearest(str(name), known)
    if ours := our_key(key):
        return Problem(key, "unknown key", hint=f"it is called {ours} here")
    if near:
        return Problem(key, "unknown key", hint=f"did you mean {_join(section, near)}?")
    first, dot, rest = str(name).partition(".")
    if dot and first in known:
        hint = f"a dot does not nest in YAML: write {first}: {{{rest}: ...}}"
        return Problem(key, "unknown key", hint=hint)
    place = f"{section} has" if section else "there are"
    return Problem(key, "unknown key", hint=f"{place} {', '.join(known)}")


def _takes(annotation: Any, value: Any) -> bool:
    """Return whether a value is of a declared type; an integer passes as a float, a bool never."""
    if annotation is Any:
        return True
    if annotation in (None, type(None)):
        return value is None
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_takes(member, value) for member in args)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin is list:
        return isinstance(value, list) and all(_takes(args[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _takes(args[0], name) and _takes(args[1], item) for name, item in value.items()
        )
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is annotation


def spelled(annotation: Any, rule: Rule) -> str:
    """Spell what a key takes, for people."""
    parts: dict[str, None] = {}
    for member in _members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            parts.update(dict.fromkeys(str(choice) for choice in args))
        elif origin is list:
            parts[f"a list, each item {spelled(args[0], _ANY)}"] = None
        elif origin is dict:
            parts["a section of keys"] = None
        elif member is type(None):
            parts["null"] = None
        else:
            parts[_NAMES.get(member, str(member))] = None
    text = " or ".join(parts) if len(parts) < 3 else f"one of {', '.join(parts)}"
    limit = rule.expects(-math.inf) if rule.at_least is not None or rule.above is not None else None
    return f"{text} ({limit.replace('a number ', '')})" if limit else text


def _type_hint(annotation: Any, value: Any) -> str | None:
    members = _members(annotation)
    if isinstance(value, bool) and bool not in members and not {int, float} & set(members):
        return "YAML reads yes, no, on and off as true and false: quote the word"
    if str in members and isinstance(value, int | float):
        return "quote it if it is text: \"'...'\" on the command line"
    if isinstance(value, str):
        choices = [
            c for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m)
        ]
        known = [str(choice) for choice in choices]
        ours = VALUES.get(value)
        return f"it is called {ours} here" if ours in known else did_you_mean(value, known)
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def dataclass_in(annotation: Any) -> type | None:
    """Return the section that a type stands for, if it stands for one."""
    found = (m for m in _members(annotation) if dataclasses.is_dataclass(m))
    return next((m for m in found if isinstance(m, type)), None)


def _is_named(annotation: Any) -> bool:
    """Return whether a type is a dict of nodes, as opposed to one node."""
    args = typing.get_args(annotation)
    return typing.get_origin(annotation) is dict and args[1] is not Any


def _build(schema: Any, raw: dict[str, Any]) -> Any:
    known = declared(schema)
    hints = typing.get_type_hints(schema)
    values = {name: _built(hints[name], raw[name]) for name in known if name in raw}
    if is_open(schema):
        values["extra"] = {name: value for name, value in raw.items() if name not in known}
    return schema(**values)


def _built(annotation: Any, value: Any) -> Any:
    section = dataclass_in(annotation)
    return value if section is None or value is None else _build(section, value)


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def shown(value: Any) -> str:
    """Spell a value of a configuration for a message, briefly and with its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds: dict[type, str] = {dict: "section", list: "list", str: "text"}
    kind = kinds.get(type(value))
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind})" if kind else text


def fill_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a composed configuration with every key of ours, in the schema's order.

    Keys that have no effect with the chosen strategy stay out, unless they were written.
    """
    return _filled(raw, Config)


def _filled(raw: dict[str, Any], schema: type) -> dict[str, Any]:
    chosen = raw.get("name", "single")  # of a strategy; elsewhere no rule asks for it
    filled: dict[str, Any] = {}
    hints = typing.get_type_hints(schema)
    for name, one in declared(schema).items():
        users, default = rule_of(one).strategies, default_of(one)
        section = dataclass_in(hints[name])
        given = raw.get(name, {} if dataclasses.is_dataclass(default) else default)
        if section is not None and isinstance(given, dict):
            filled[name] = _filled(given, section)
        elif name in raw or (given is not REQUIRED and (not users or chosen in users)):
            filled[name] = given
    return {**filled, **{name: value for name, value in raw.items() if name not in filled}}
