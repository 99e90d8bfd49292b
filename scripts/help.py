"""Answer what asks for information instead of a run: --help, --cfg, --info and their like."""

import sys
import textwrap
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from conf.errors import ConfigError, Problem, did_you_mean
from scripts.catalog.groups import below, description, groups_in
from scripts.catalog.keys import Key, keys_of
from scripts.cli.arguments import Arguments, parser
from scripts.composition.compose import answer_by_hydra, config_text
from scripts.composition.sources import CONF

_WIDTH = 96
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
    parts += [_listed(group, list(choices)) for group, choices in groups.items()]
    parts += ["", "Overrides:", _GRAMMAR, _options()]
    return "\n".join(parts)


def topic_text(arguments: Arguments, topic: str) -> str:
    """Return a group's choices and the meaning of its keys; of `trainer.precision` only that key.

    Raises ConfigError for a group that does not exist.
    """
    groups = groups_in([*arguments.config_dirs, arguments.config_path or CONF])
    group, _, rest = topic.partition(".")
    parts = []
    for name, files in below(groups, group).items():
        keys = keys_of(name, files)
        if rest:
            keys = [k for k in keys if f"{k.name}.".startswith(f"{topic}.")]
        else:
            width = max(map(len, files))
            parts += [f"{name}=CHOICE:"]
            parts += [f"  {choice:<{width}}  {description(p)}" for choice, p in files.items()]
        parts += [_key_line(key, files) for key in keys]
        parts += [""] if keys or not rest else []
    if rest and not parts:
        known = [
            k.name for name, files in below(groups, group).items() for k in keys_of(name, files)
        ]
        raise ConfigError(Problem(topic, "there is no such key", did_you_mean(topic, known)))
    return "\n".join(parts)


def _key_line(key: Key, files: Mapping[str, Path]) -> str:
    some = key.choices and len(key.choices) < len(files)
    which = f" [{', '.join(key.choices)}]" if some else ""
    text = f"{key.name}={key.value}" if key.value else key.name
    meaning = f"  {key.meaning}" if key.meaning else ""
    return textwrap.fill(
        f"{text}{meaning}{which}", _WIDTH, initial_indent="  ", subsequent_indent="      "
    )


def _print_config(arguments: Arguments) -> None:
    text, problems = config_text(arguments)
    sys.stdout.write(text)
    if problems:
        sys.stdout.flush()  # the configuration before its mistakes, wherever both go
        raise ConfigError(problems)


def _listed(group: str, choices: list[str]) -> str:
    return textwrap.fill(
        ", ".join(choices), _WIDTH, initial_indent=f"  {group}: ", subsequent_indent="      "
    )


def _options() -> str:
    lines = parser().format_help().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("options"))
    return "\n".join(["Options:", *lines[start + 1 :]])
