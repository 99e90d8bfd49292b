"""The keys of a group with their meanings: from the schema, then from its files."""

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conf.check import dataclass_in, spelled
from conf.fields import REQUIRED, declared, default_of, rule_of
from conf.schema import Config
from conf.yaml_dump import word

_LINE = re.compile(r"( *)([\w-]+):(?: +([^#]*?))? *(?:# *(.*))?$")
_SKIPPED = ("_target_", "defaults", "_partial_", "_args_")


@dataclass(slots=True)
class Key:
    """One key: its value by default, what it means, and the choices whose files have it."""

    name: str
    value: str = ""
    meaning: str = ""
    choices: list[str] = field(default_factory=list)


def keys_of(group: str, files: Mapping[str, Path]) -> list[Key]:
    """Return the keys of a group such as `optimizer` or `lr_scheduler/warmup`."""
    prefix = group.replace("/", ".")
    found = {key.name: key for key in _declared(prefix)}
    for choice, path in files.items():
        for key in _written(path, prefix):
            known = found.setdefault(key.name, key)
            known.meaning = known.meaning or key.meaning
            known.value = key.value if known.value in ("", "null") else known.value
            known.choices.append(choice)
    return list(found.values())


def _declared(prefix: str) -> Iterator[Key]:
    schema: type | None = Config
    for name in prefix.split("."):
        if schema is None or name not in declared(schema):
            return
        one, annotation = declared(schema)[name], typing.get_type_hints(schema)[name]
        schema = dataclass_in(annotation) or rule_of(one).words
    if schema is not None:
        yield from _section(schema, prefix)


def _section(schema: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(schema)
    for name, one in declared(schema).items():
        section, rule, default = dataclass_in(hints[name]), rule_of(one), default_of(one)
        here = f"{prefix}.{name}"
        if section is not None:
            yield from _section(section, here)
            continue
        takes = "" if rule.node or rule.words else f" ({spelled(hints[name], rule)})"
        value = "" if default is REQUIRED or isinstance(default, dict | list) else word(default)
        yield Key(here, value, f"{rule.doc}{takes}")


def _written(path: Path, prefix: str) -> Iterator[Key]:
    """Yield the keys of a YAML file with the comments behind them."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    if any(line.startswith("# @package _global_") for line in lines):
        return
    parents: list[tuple[int, str]] = []
    for line in lines:
        if (match := _LINE.match(line)) is None:
            continue
        indent, name, value, meaning = len(match[1]), match[2], match[3] or "", match[4] or ""
        parents = [*((i, n) for i, n in parents if i < indent), (indent, name)]
        path_in_file = [n for _, n in parents]
        if not any(n in _SKIPPED for n in path_in_file) and (value or meaning):
            yield Key(".".join([prefix, *path_in_file]), value, meaning)
