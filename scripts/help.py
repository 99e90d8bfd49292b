"""Answer what asks for information instead of a run: --help, --cfg, --info and their like.

The keys of a group and their meanings are those of the schema, then those of its files.
"""

import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from conf.check import spelled
from conf.errors import ConfigError, Problem, did_you_mean
from conf.fields import REQUIRED, dataclass_in, declared, default_of, rule_of
from conf.schema import Config
from conf.yaml_file import word
from scripts.cli.arguments import Arguments, parser
from scripts.composition.compose import answer_by_hydra, config_text
from scripts.composition.folders import CONF
from scripts.ls import below, description, groups_in

_WIDTH = 96
_LINE = re.compile(r"( *)([\w-]+):(?: +([^#]*?))? *(?:# *(.*))?$")
_SKIPPED = ("_target_", "defaults", "_partial_", "_args_")
_USAGE = """\
Train PyTorch models from YAML.

  train experiment=NAME [group=choice ...] [key=value ...]    train
  train -m experiment=NAME optimizer.lr=0.1,0.01              a job for each value, then a table
  train experiment=NAME dry_run=true                          the plan: checked, nothing trained
  train --cfg job experiment=NAME [--resolve] [-p KEY]        the composed configuration
  train --config-dir DIR experiment=MINE                      with configs of your own
  train --help optimizer                                      a group: choices, keys, meanings
"""
_GRAMMAR = """\
  key=value   sets a key (optimizer.lr=0.1); text with , = or spaces in quotes: name="'a, b'"
  group=x     picks conf/group/x.yaml; 'callbacks=[default,ema]' picks several
  +key=value  adds an argument to a node; ~key removes one; +group=x adds a group
  key=a,b     with -m: a job for each; also range(1,4), choice(a,b), glob(*)
"""


@dataclass(slots=True)
class Key:
    """One key: its value by default, what it means, and the choices whose files have it."""

    name: str
    value: str = ""
    meaning: str = ""
    choices: list[str] = field(default_factory=list)


def answer(arguments: Arguments) -> bool:
    """Print what was asked for and return True; return False where a run was asked for."""
    if arguments.help:
        topics = [text for text in arguments.overrides if "=" not in text]
        print("\n".join(topic_text(arguments, topic) for topic in topics) or help_text(arguments))
    elif arguments.version:
        print(f"Regimen {metadata.version('regimen')} (Hydra {metadata.version('hydra-core')})")
    elif arguments.cfg == "job":
        _print_config(arguments)
    elif arguments.cfg or arguments.info or arguments.hydra_help or arguments.shell_completion:
        answer_by_hydra(arguments)
    else:
        return False
    return True


def help_text(arguments: Arguments) -> str:
    """Return the help: usage, experiments, groups with their choices, options."""
    groups = groups_in([*arguments.config_dirs, arguments.config_path or CONF])
    experiments = groups.pop("experiment", {})
    width = max((len(name) for name in experiments), default=0)
    parts = [_USAGE, "Experiments (experiment=...):"]
    parts += [f"  {name:<{width}}  {description(path)}" for name, path in experiments.items()]
    parts += ["", "Groups (group=choice):"]
    parts += [_filled(f"{group}: {', '.join(choices)}") for group, choices in groups.items()]
    parts += ["", "Overrides:", _GRAMMAR, _options()]
    return "\n".join(parts)


def topic_text(arguments: Arguments, topic: str) -> str:
    """Return a group's choices and the meaning of its keys; of `trainer.precision` only that key.

    Raises ConfigError for a group that does not exist.
    """
    groups = groups_in([*arguments.config_dirs, arguments.config_path or CONF])
    group, _, rest = topic.partition(".")
    parts: list[str] = []
    known: list[str] = []
    for name, files in below(groups, group).items():
        keys = keys_of(name, files)
        known += [key.name for key in keys]
        if rest:
            keys = [key for key in keys if f"{key.name}.".startswith(f"{topic}.")]
        else:
            width = max(map(len, files))
            parts += [f"{name}=CHOICE:"]
            parts += [f"  {choice:<{width}}  {description(p)}" for choice, p in files.items()]
        parts += [_key_line(key, files) for key in keys]
        parts += [""] if keys or not rest else []
    if not parts:
        raise ConfigError(Problem(topic, "there is no such key", did_you_mean(topic, known)))
    return "\n".join(parts)


def _key_line(key: Key, files: Mapping[str, Path]) -> str:
    some = key.choices and len(key.choices) < len(files)
    which = f" [{', '.join(key.choices)}]" if some else ""
    text = f"{key.name}={key.value}" if key.value else key.name
    meaning = f"  {key.meaning}" if key.meaning else ""
    return _filled(f"{text}{meaning}{which}")


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      ")


def _print_config(arguments: Arguments) -> None:
    text, problems = config_text(arguments)
    sys.stdout.write(text)
    if problems:
        sys.stdout.flush()  # the configuration before its mistakes, wherever both go
        raise ConfigError(problems)


def _options() -> str:
    lines = parser().format_help().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("options"))
    return "\n".join(["Options:", *lines[start + 1 :]])


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
