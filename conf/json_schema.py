"""The JSON schema of a configuration and of the files of a group, for editors and other programs.

A file is a piece of a configuration: no key is required in it, and each value may be an
interpolation. A node with a `_target_` that is given here takes the target's arguments only.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from conf.check import dataclass_in
from conf.fields import REQUIRED, Rule, declared, default_of, is_open, rule_of
from conf.schema import Config

Schema = dict[str, Any]
# The argument names of targets, by the section of the configuration in which they are used.
Targets = Mapping[str, Mapping[str, tuple[str, ...]]]

DIALECT = "http://json-schema.org/draft-07/schema#"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_OPEN = r"\$\{|^\?\?\?$"  # an interpolation, or ???
_DEFAULTS = {"type": "array", "description": "the choices that this file is composed of"}


def configuration(targets: Targets) -> Schema:
    """Return the schema of a whole configuration, such as a run's config.yaml."""
    required = [name for name, one in declared(Config).items() if default_of(one) is REQUIRED]
    return _document("configuration", {**_section(Config, ""), "required": required}, targets)


def file_of_group(group: str, targets: Targets) -> Schema:
    """Return the schema of the files of a group: `optimizer`, `task/loss`, `experiment`.

    The files of a group that no section is named after hold keys of the root.
    """
    parts = group.split("/")
    if parts[0] not in declared(Config):
        return _document(group, _with_defaults(_section(Config, "")), targets)
    return _document(group, _with_defaults(_inside(parts)), targets)


def _document(title: str, body: Schema, targets: Targets) -> Schema:
    found: dict[str, Schema] = {}
    missing = set(_references(body))
    while missing:  # what a definition refers to is itself alone
        name = missing.pop()
        found[name] = _any_node(name, targets.get(name, {}))
    definitions = {"definitions": dict(sorted(found.items()))} if found else {}
    return {"$schema": DIALECT, "title": title, **body, **definitions}


def _references(schema: Any) -> typing.Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for child in schema.values():
            yield from _references(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from _references(child)


def _with_defaults(body: Schema) -> Schema:
    if "properties" not in body:
        return body
    return {**body, "properties": {"defaults": _DEFAULTS, **body["properties"]}}


def _inside(parts: list[str]) -> Schema:
    """Return what stands at a key, from the section that declares it."""
    schema: type = Config
    for index, name in enumerate(parts):
        if name not in declared(schema):
            break
        one, hint = declared(schema)[name], typing.get_type_hints(schema)[name]
        inner = dataclass_in(hint)
        if index + 1 == len(parts):
            return _section(inner, parts[0]) if inner else _value(hint, one, parts[0])
        if (section := inner or rule_of(one).words) is None:
            break
        schema = section
    return {"allOf": [_reference(parts[0])]}


def _section(schema: type, top: str) -> Schema:
    """Return the keys of a section; `top` is the key at the root that it belongs to."""
    hints = typing.get_type_hints(schema)
    properties = {
        name: {"description": rule_of(one).doc, **_value(hints[name], one, top or name)}
        for name, one in declared(schema).items()
    }
    rest = _reference(top) if is_open(schema) else False
    return {"type": "object", "properties": properties, "additionalProperties": rest}


def _value(annotation: Any, one: "dataclasses.Field[Any]", top: str) -> Schema:
    """Return what a key takes: one schema for all of its types, beside its named choices."""
    rule = rule_of(one)
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    choices = [c for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m)]
    merged: Schema = {"type": []}
    for member in members:
        if typing.get_origin(member) is not Literal:
            kind = _type(member, rule, top)
            merged = {**merged, **kind, "type": [*merged["type"], kind["type"]]}
    if "string" not in merged["type"]:
        merged = {**merged, "type": [*merged["type"], "string"], "pattern": _OPEN}
    whole = {"anyOf": [{"enum": choices}, merged]} if choices else merged
    return {**_default(one), **whole}


def _type(annotation: Any, rule: Rule, top: str) -> Schema:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return {"type": "null"}
    if dataclasses.is_dataclass(annotation):
        return _section(typing.cast(type, annotation), top)
    if origin is list:
        return {"type": "array", "items": _item(args[0], top)}
    if origin is dict and rule.words is not None:
        return {**_section(rule.words, top), "allOf": [_reference(top)]}
    if origin is dict and rule.node and args[1] is Any:
        return {"type": "object", "allOf": [_reference(top)]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _item(args[1], top)}
    kind: Schema = {"type": _TYPES[annotation]}
    if annotation in (int, float):
        limits = (
            ("minimum", rule.at_least),
            ("exclusiveMinimum", rule.above),
            ("maximum", rule.at_most),
        )
        kind |= {word: limit for word, limit in limits if limit is not None}
    return kind


def _item(annotation: Any, top: str) -> Schema:
    if annotation in _TYPES:
        return {"type": sorted({_TYPES[annotation], "string"})}
    return _reference(top)


def _default(one: "dataclasses.Field[Any]") -> Schema:
    value = default_of(one)
    if value is REQUIRED or dataclasses.is_dataclass(value):
        return {}
    if isinstance(value, float) and not math.isfinite(value):
        return {}
    return {"default": value}


def _reference(top: str) -> Schema:
    return {"$ref": f"#/definitions/{top}"}


def _any_node(top: str, targets: Mapping[str, tuple[str, ...]]) -> Schema:
    """Return the schema of anything inside a section that the user extends, at any depth."""
    inner = _reference(top)
    rules = {"allOf": [_arguments(*target) for target in targets.items()]} if targets else {}
    names: Schema = {"anyOf": [{"enum": list(targets)}, {"type": "string"}]}
    names = names if targets else {"type": "string"}
    return {
        "properties": {"_target_": {"description": "an import path", **names}},
        "additionalProperties": inner,
        "items": inner,
        **rules,
    }


def _arguments(path: str, names: tuple[str, ...]) -> Schema:
    """Return the rule that a node with this target has no keys but these."""
    return {
        "if": {"properties": {"_target_": {"const": path}}, "required": ["_target_"]},
        "then": {
            "properties": dict.fromkeys(("_target_", "defaults", *names), True),
            "additionalProperties": False,
        },
    }
