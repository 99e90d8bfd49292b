"""`regimen schema [GROUP]`: the JSON schema of a configuration, or of the files of a group.

`regimen schema --write conf/editor` writes all of them into a folder. A YAML file names its own
by the line `# yaml-language-server: $schema=../editor/experiment.json`, by which editors complete
and check keys.
"""

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from regimen.conf.fields import Key, choices, declared, is_open, members
from regimen.conf.interpolation import children
from regimen.conf.schema import OWN_KEYS, Config
from regimen.scripts.cli.arguments import command_parser
from regimen.scripts.cli.files import make_above
from regimen.scripts.composition.folders import CONF
from regimen.scripts.help import below, groups_in, key_of
from regimen.trainer.files.atomic import storing, write_text
from regimen.trainer.targets.allow_list import locate
from regimen.trainer.targets.instantiate import SPECIAL

Schema = dict[str, Any]
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_LIMITS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum"}
_OPEN = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}  # an interpolation, or ???
# Arguments in other packages change with the installed version.
_OURS = "regimen."


def schema(argv: Sequence[str]) -> int:
    """Print or write the schemas that a command line asks for. Raises ConfigError, StorageError."""
    parser = command_parser("regimen schema", __doc__)
    parser.add_argument("group", nargs="?", help="optimizer, task/loss, experiment, ...")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write all schemas into a folder")
    arguments = parser.parse_intermixed_args(argv)
    if (folder := arguments.write) is None:
        print(schema_text(arguments.group), end="")
        return 0
    groups = (None, *groups_in([CONF]))
    texts = {(group or "configuration").replace("/", "."): schema_text(group) for group in groups}
    make_above(folder)
    with storing(folder):
        folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        write_text(folder / f"{name}.json", text)
    return 0


def schema_text(group: str | None) -> str:
    """Return the schema of a group's files as JSON; None is the whole configuration.

    A file is a piece of a configuration: no key is required in it, and each value may be an
    interpolation. A node whose `_target_` is one of ours takes the target's arguments only.
    Raises ConfigError if there is no such group.
    """
    title = (group or "configuration").strip("/")
    top = title.partition("/")[0]
    if group is not None:
        below(groups_in([CONF]), group)
    # The files of a group that no section is named after hold keys of the root.
    body: Schema = {"allOf": [_reference(top)]} if top in declared(Config) else _section(Config, "")
    if one := key_of(title):
        body = _value(one, top)
    if group is not None:
        body["properties"] = {"defaults": _defaults(), **body.get("properties", {})}
    found = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **body}
    used = [n for n in declared(Config) if f'"#/definitions/{n}"' in json.dumps(found)]
    return json.dumps({**found, "definitions": {n: _any_node(n) for n in used}}, indent=1) + "\n"


def _defaults() -> Schema:
    names = {}
    for group, files in groups_in([CONF]).items():
        choice = {"type": "string", "enum": list(files)}
        several = {"type": "array", "items": choice}
        names[f"override /{group}"] = {"anyOf": [choice, several, {"type": "null"}]}
    entry = {"type": ["string", "object"], "properties": names}
    return {"type": "array", "description": "the choices it is composed of", "items": entry}


def _section(section: type, top: str) -> Schema:
    """Return the keys of a section; `top` is the key at the root that it belongs to."""
    properties = {
        name: {"description": one.doc, **_value(one, top or name)}
        for name, one in declared(section).items()
    }
    rest = _reference(top) if is_open(section) else False
    return {"type": "object", "properties": properties, "additionalProperties": rest}


def _value(one: Key, top: str) -> Schema:
    """Return what a key takes: one schema for all of its types, beside its named choices."""
    if one.type is Any:
        return _reference(top)
    named, types = choices(one.type), members(one.type)
    kinds = [_type(m, one, top) for m in types if typing.get_origin(m) is not Literal]
    if all(kind["type"] != "string" for kind in kinds):
        kinds.append(_OPEN)
    merged = {name: value for kind in kinds for name, value in kind.items()}
    merged["type"] = [kind["type"] for kind in kinds]
    return {"anyOf": [{"enum": named}, merged]} if named else merged


def _type(annotation: Any, one: Key, top: str) -> Schema:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return _section(cast(type, annotation), top)
    if origin is list:
        return {"type": "array", "items": _value(Key(type=args[0]), top)}
    if origin is dict and (args[1] is Any or Key(type=args[1]).section):  # one may hold itself
        words = _section(one.nested_schema, top) if one.nested_schema else {"type": "object"}
        return {**words, "allOf": [_reference(top)]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(replace(one, type=args[1]), top)}
    numbers = one.limits if annotation in (int, float) else {}
    return {"type": _TYPES[annotation], **{_LIMITS[sign]: n for sign, n in numbers.items()}}


def _reference(top: str) -> Schema:
    return {"$ref": f"#/definitions/{top}"}


def _any_node(top: str) -> Schema:
    """Return the schema of anything inside a section that the user extends, at any depth."""
    rules, inner = _targets().get(top, {}), _reference(top)
    target = {"description": "an import path", "type": "string", "examples": list(rules)}
    node = {"properties": {"_target_": target}, "additionalProperties": inner}
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
    found = dict[str, dict[str, Schema]]()
    for path in sorted(CONF.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text("utf-8"))
        for top, target in _named(content, path.relative_to(CONF).parts[0]):
            parameters = inspect.signature(locate(target)).parameters.values()
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                found.setdefault(top, {})[target] = {p.name: True for p in parameters}
    return found


def _named(node: Any, top: str) -> Iterator[tuple[str, str]]:
    """Yield the section and the path of each target; an experiment's first keys are sections."""
    for key, child in children(node):
        if key == "_target_" and str(child).startswith(_OURS):
            yield top, child
        yield from _named(child, key if top in ("experiment", "debug") else top)
