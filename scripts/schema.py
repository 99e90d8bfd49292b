"""`regimen schema [GROUP]`: the JSON schema of a configuration, or of the files of a group.

`regimen schema --write conf/editor` writes all of them into a folder. A YAML file names its own
by the line `# yaml-language-server: $schema=../editor/experiment.json`, by which editors complete
and check keys.
"""

import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from conf.fields import (
    REQUIRED,
    Rule,
    dataclass_in,
    declared,
    default_of,
    is_open,
    members,
    rule_of,
)
from conf.interpolation import children
from conf.schema import OWN_KEYS, Config
from scripts.cli.arguments import command_parser
from scripts.composition.folders import CONF
from scripts.help import below, groups_in
from trainer.targets.allow_list import locate
from trainer.targets.instantiate import SPECIAL

Schema = dict[str, Any]
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_OPEN = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}  # an interpolation, or ???
# Arguments in other packages change with the installed version.
_OURS = ("models.", "data.", "trainer.", "callbacks.")


def schema(argv: Sequence[str]) -> int:
    """Print or write the schemas that a command line asks for. Raises ConfigError."""
    parser = command_parser("regimen schema", __doc__)
    parser.add_argument("group", nargs="?", help="optimizer, task/loss, experiment, ...")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write all schemas into a folder")
    arguments = parser.parse_intermixed_args(argv)
    if (folder := arguments.write) is None:
        print(schema_text(arguments.group), end="")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for group in (None, *groups_in([CONF])):
        name = (group or "configuration").replace("/", ".")
        (folder / f"{name}.json").write_text(schema_text(group), encoding="utf-8")
    return 0


def schema_text(group: str | None) -> str:
    """Return the schema of a group's files as JSON; None is the whole configuration.

    A file is a piece of a configuration: no key is required in it, and each value may be an
    interpolation. A node whose `_target_` is one of ours takes the target's arguments only.
    Raises ConfigError if there is no such group.
    """
    keys, parts = declared(Config), (group or "configuration").strip("/").split("/")
    if group is not None:
        below(groups_in([CONF]), group)
    # The files of a group that no section is named after hold keys of the root.
    body = _inside(parts) if parts[0] in keys else _section(Config, "")
    if group is None:
        body["required"] = [name for name, one in keys.items() if default_of(one) is REQUIRED]
    elif "properties" in body:
        body["properties"] = {"defaults": _defaults(), **body["properties"]}
    found = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "/".join(parts), **body}
    used = [top for top in keys if f'"#/definitions/{top}"' in json.dumps(found)]
    if used:
        found["definitions"] = {top: _any_node(top) for top in sorted(used)}
    return json.dumps(found, indent=1) + "\n"


def _defaults() -> Schema:
    names: Schema = {}
    for group, files in groups_in([CONF]).items():
        choice: Schema = {"type": "string", "enum": list(files)}
        several: Schema = {"type": "array", "items": choice}
        names[group] = {"type": ["string", "null", "array"]}
        names[f"override /{group}"] = {"anyOf": [choice, several, {"type": "null"}]}
    entry = {"type": ["string", "object"], "properties": names}
    return {"type": "array", "description": "the choices it is composed of", "items": entry}


def _inside(parts: list[str]) -> Schema:
    """Return what stands at a key, from the section that declares it."""
    section: type | None = Config
    found: Schema = {}
    for name in parts:
        if section is None or name not in declared(section):
            return {"allOf": [_reference(parts[0])]}
        one, hint = declared(section)[name], typing.get_type_hints(section)[name]
        inner = dataclass_in(hint)
        found = _section(inner, parts[0]) if inner else _value(hint, one, parts[0])
        section = inner or rule_of(one).words
    return found


def _section(section: type, top: str) -> Schema:
    """Return the keys of a section; `top` is the key at the root that it belongs to."""
    hints = typing.get_type_hints(section)
    properties = {
        name: {"description": rule_of(one).doc, **_value(hints[name], one, top or name)}
        for name, one in declared(section).items()
    }
    rest = _reference(top) if is_open(section) else False
    return {"type": "object", "properties": properties, "additionalProperties": rest}


def _value(annotation: Any, one: "dataclasses.Field[Any]", top: str) -> Schema:
    """Return what a key takes: one schema for all of its types, beside its named choices."""
    choices: list[Any] = []
    merged: Schema = {"type": []}
    for member in members(annotation):
        if typing.get_origin(member) is Literal:
            choices += typing.get_args(member)
        else:
            kind = _type(member, rule_of(one), top)
            merged = {**merged, **kind, "type": [*merged["type"], kind["type"]]}
    if "string" not in merged["type"]:
        merged = {**merged, **_OPEN, "type": [*merged["type"], "string"]}
    whole: Schema = {"anyOf": [{"enum": choices}, merged]} if choices else merged
    default = default_of(one)
    if default is REQUIRED or dataclasses.is_dataclass(default) or default == math.inf:
        return whole
    return {"default": default, **whole}


def _type(annotation: Any, rule: Rule, top: str) -> Schema:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
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
    limits = {"minimum": rule.at_least, "exclusiveMinimum": rule.above, "maximum": rule.at_most}
    numbers = {word: limit for word, limit in limits.items() if limit is not None}
    return {"type": _TYPES[annotation], **(numbers if annotation in (int, float) else {})}


def _item(annotation: Any, top: str) -> Schema:
    if annotation in _TYPES:
        return {"type": sorted({_TYPES[annotation], "string"})}
    return _reference(top)


def _reference(top: str) -> Schema:
    return {"$ref": f"#/definitions/{top}"}


def _any_node(top: str) -> Schema:
    """Return the schema of anything inside a section that the user extends, at any depth."""
    rules, inner = _targets().get(top, {}), _reference(top)
    target = {"description": "an import path", "type": "string", "examples": list(rules)}
    node: Schema = {"properties": {"_target_": target}, "additionalProperties": inner}
    own = [*OWN_KEYS[top], *OWN_KEYS["lr_scheduler"]] if top in OWN_KEYS else []
    beside = dict.fromkeys((*SPECIAL, "defaults", *own), True)
    conditions = [
        {
            "if": {"properties": {"_target_": {"const": path}}, "required": ["_target_"]},
            "then": {"properties": {**arguments, **beside}, "additionalProperties": False},
        }
        for path, arguments in rules.items()
    ]
    return {**node, "items": inner, **({"allOf": conditions} if conditions else {})}


@cache
def _targets() -> dict[str, dict[str, Schema]]:
    """Return, by section, our targets in the shipped files, and their arguments."""
    found: dict[str, dict[str, Schema]] = {}
    for path in sorted(CONF.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for top, target in _named(content, path.relative_to(CONF).parts[0]):
            parameters = inspect.signature(locate(target)).parameters.values()
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                arguments = {p.name: _argument(p.annotation) for p in parameters}
                found.setdefault(top, {})[target] = arguments
    return found


def _argument(annotation: Any) -> Any:
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return {"anyOf": [{"enum": choices}, _OPEN]} if choices else True


def _named(node: Any, top: str) -> Iterator[tuple[str, str]]:
    """Yield the section and the path of each target; an experiment's first keys are sections."""
    for key, child in children(node):
        if key == "_target_" and str(child).startswith(_OURS):
            yield top, child
        yield from _named(child, key if top in ("experiment", "debug") else top)
