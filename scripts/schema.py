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
    folder = arguments.write
    if folder is None:
        print(schema_text(arguments.group), end="")
        return 0
    texts = {"configuration": schema_text(None)}
    for group in groups_in([CONF]):
        texts[group.replace("/", ".")] = schema_text(group)
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
    key = key_of(title)
    if key:
        body = _value(key, top)
    elif top in declared(Config):
        body = {"allOf": [_reference(top)]}
    else:  # a group that no section is named after: its files hold keys of the root
        body = _section(Config, "")
    if group is not None:
        body["properties"] = {"defaults": _defaults(), **body.get("properties", {})}
    document = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **body}
    text = json.dumps(document)
    used = [name for name in declared(Config) if f'"#/definitions/{name}"' in text]
    document["definitions"] = {name: _any_node(name) for name in used}
    return json.dumps(document, indent=1) + "\n"


def _defaults() -> Schema:
    names = {}
    for group, files in groups_in([CONF]).items():
        choice = {"type": "string", "enum": list(files)}
        several = {"type": "array", "items": choice}
        names[f"override /{group}"] = {"anyOf": [choice, several, {"type": "null"}]}
    entry = {"type": ["string", "object"], "properties": names}
    return {"type": "array", "description": "the choices it is composed of", "items": entry}


def _section(section: type, top: str) -> Schema:
    """Return the schema of a section's keys; `top` is the key at the root that it belongs to."""
    properties = {}
    for name, key in declared(section).items():
        properties[name] = {"description": key.doc, **_value(key, top or name)}
    further = _reference(top) if is_open(section) else False
    return {"type": "object", "properties": properties, "additionalProperties": further}


def _value(key: Key, top: str) -> Schema:
    """Return the schema of a key's values: one of all its types, beside its named choices."""
    if key.type is Any:
        return _reference(top)
    merged = Schema()
    types = []
    for member in members(key.type):
        if typing.get_origin(member) is not Literal:
            of_member = _type(member, key, top)
            merged |= of_member
            types.append(of_member["type"])
    if "string" not in types:
        merged |= _OPEN
        types.append("string")
    merged["type"] = types
    named = choices(key.type)
    return {"anyOf": [{"enum": named}, merged]} if named else merged


def _type(annotation: Any, key: Key, top: str) -> Schema:
    """Return the schema of one of the types that a key takes."""
    if dataclasses.is_dataclass(annotation):
        return _section(cast("type", annotation), top)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is list:
        return {"type": "array", "items": _value(Key(type=arguments[0]), top)}
    if origin is dict:
        # A section among its own entries (`optimizer.optimizers`) would have no end.
        if arguments[1] is Any or Key(type=arguments[1]).section:
            inner = _section(key.nested_schema, top) if key.nested_schema else {"type": "object"}
            return {**inner, "allOf": [_reference(top)]}
        entries = _value(replace(key, type=arguments[1]), top)
        return {"type": "object", "additionalProperties": entries}
    schema: Schema = {"type": _TYPES[annotation]}
    if annotation in (int, float):
        for sign, limit in key.limits.items():
            schema[_LIMITS[sign]] = limit
    return schema


def _reference(top: str) -> Schema:
    return {"$ref": f"#/definitions/{top}"}


def _any_node(top: str) -> Schema:
    """Return the schema of anything inside a section that the user extends, at any depth."""
    arguments_of = _targets().get(top, {})
    inner = _reference(top)
    target = {"description": "an import path", "type": "string", "examples": list(arguments_of)}
    node: Schema = {
        "properties": {"_target_": target},
        "additionalProperties": inner,
        "items": inner,
    }
    beside = dict.fromkeys((*SPECIAL, "defaults"), True)
    if top in OWN_KEYS:
        beside |= dict.fromkeys((*OWN_KEYS[top], *OWN_KEYS["lr_scheduler"]), True)
    conditions = []
    for path, arguments in arguments_of.items():
        is_target = {"properties": {"_target_": {"const": path}}, "required": ["_target_"]}
        takes = {"properties": {**arguments, **beside}, "additionalProperties": False}
        conditions.append({"if": is_target, "then": takes})
    if conditions:
        node["allOf"] = conditions
    return node


@cache
def _targets() -> dict[str, dict[str, Schema]]:
    """Return, by section, our targets in the shipped files, and their arguments."""
    targets = dict[str, dict[str, Schema]]()
    for path in sorted(CONF.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text("utf-8"))
        for section, target in _targets_in(content, path.relative_to(CONF).parts[0]):
            parameters = inspect.signature(locate(target)).parameters
            if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                arguments = Schema(dict.fromkeys(parameters, True))
                targets.setdefault(section, {})[target] = arguments
    return targets


def _targets_in(node: Any, section: str) -> Iterator[tuple[str, str]]:
    """Yield the section and the path of each target; an experiment's first keys are sections."""
    for key, child in children(node):
        if key == "_target_" and str(child).startswith(_OURS):
            yield section, child
        yield from _targets_in(child, key if section in ("experiment", "debug") else section)
