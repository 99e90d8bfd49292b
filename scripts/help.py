"""What a command line may hold: groups and keys, as --help, TAB and the docs show them.

The keys of a group and their meanings are those of the schema, then those of its files.
"""

import argparse
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from inspect import getdoc
from itertools import islice, pairwise
from pathlib import Path

from regimen.conf.check import describe_type
from regimen.conf.errors import ConfigError, did_you_mean
from regimen.conf.fields import REQUIRED, Key, declared
from regimen.conf.interpolation import join
from regimen.conf.layout import installed_version
from regimen.conf.schema import Config
from regimen.conf.yaml_file import format_scalar
from regimen.scripts.cli.arguments import Arguments, command_parser, parser
from regimen.scripts.commands import COMMANDS
from regimen.scripts.composition.compose import config_text, print_by_hydra
from regimen.scripts.composition.folders import CONF
from regimen.trainer.runs.status import MANIFEST

_WIDTH = 96
_LINE = re.compile(r"( *)([\w-]+):(?: +([^#]*?))? *(?:# *(.*))?$")
_SKIPPED = {"_target_", "defaults", "_partial_", "_args_"}
# Comments that are no description: commands, and lines for Hydra and editors.
_FOR_PROGRAMS = (
    "train ",
    "pip ",
    "uv ",
    "torchrun ",
    "python ",
    "@package",
    "yaml-language-server:",
)
Groups = dict[str, dict[str, Path]]  # the file of each choice of each group


@dataclass(slots=True)
class Line:
    """One key: its default, its meaning, and the choices of its group whose files have it."""

    name: str
    value: str
    meaning: str
    choices: list[str] = field(default_factory=list)

    def text(self, choices_of_group: int) -> str:
        """Return the line as text. Choices are named unless all of the group have the key."""
        text = self.name
        if self.value:
            text += f"={self.value}"
        text += f"  {self.meaning}".rstrip()
        if 0 < len(self.choices) < choices_of_group:
            text += f" [{', '.join(self.choices)}]"
        return _filled(text)


def answer(arguments: Arguments) -> None:
    """Print a text instead of running: help, the version, a configuration. Raises ConfigError."""
    if arguments.help:
        groups = groups_in([*arguments.config_dirs, arguments.config_path or CONF])
        topics = [text for text in arguments.overrides if "=" not in text]
        print("\n".join(topic_text(groups, topic) for topic in topics) or help_text(groups))
    elif arguments.version:
        print(f"Regimen {installed_version()} (Hydra {metadata.version('hydra-core')})")
    elif arguments.cfg == "job":
        text, problems = config_text(arguments)
        print(text, end="", flush=True)  # before its mistakes, which go to another stream
        if problems:
            raise ConfigError(problems)
    elif arguments.cfg:
        print_by_hydra(arguments)
    else:
        completion([text.removeprefix("install=") for text in arguments.overrides])


def help_text(groups: Groups) -> str:
    """Return the help: usage, experiments, groups with their choices, options."""
    usage, _, grammar = str(getdoc(Arguments)).partition("\nOverrides:\n")
    lines = [usage, "Experiments (experiment=...):"]
    lines += _described(groups.get("experiment", {}))
    lines += ["", "Groups (group=choice):"]
    for group, files in groups.items():
        if group != "experiment":
            lines.append(_filled(f"{group}: {', '.join(files)}"))
    options = parser().format_help().partition("\noptions:\n")[2]
    lines += ["", "Overrides:", grammar, "", "Options:", options.rstrip()]
    return "\n".join(lines)


def topic_text(groups: Groups, topic: str) -> str:
    """Return a group's choices and the meaning of its keys; of `trainer.precision` only that key.

    Raises ConfigError for a group or a key that does not exist.
    """
    group, _, rest = topic.partition(".")
    text = []
    lines = dict[str, str]()
    for name, files in below(groups, group).items():
        of_group = {line.name: line.text(len(files)) for line in keys_of(name, files)}
        text += [f"{name}=CHOICE:", *_described(files), *of_group.values(), ""]
        lines |= of_group
    if rest:
        key = topic.strip("/").replace("/", ".")
        text = [line for name, line in lines.items() if f"{name}.".startswith(f"{key}.")]
    if not text:
        raise ConfigError(topic, "there is no such key", did_you_mean(topic, lines))
    return "\n".join(text)


def _described(files: Mapping[str, Path]) -> list[str]:
    width = max(map(len, files), default=0)
    return [f"  {choice:<{width}}  {description(path)}" for choice, path in files.items()]


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      ")


def groups_in(folders: Iterable[str | Path]) -> Groups:
    """Return the choices of each group with their files; the first folder that has one wins."""
    groups = Groups()
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group != "." and path.is_file():
                groups.setdefault(group, {}).setdefault(path.stem, path)
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}


def below(groups: Groups, name: str) -> Groups:
    """Return the group `name` and those inside it. Raises ConfigError if there is none."""
    name = name.strip("/")
    inside = {g: files for g, files in groups.items() if f"{g}/".startswith(f"{name}/")}
    if not inside:
        hint = did_you_mean(name, list(groups)) or f"groups: {', '.join(groups)}"
        raise ConfigError("", f"there is no group {name!r}", hint)
    return inside


def description(path: Path) -> str:
    """Return the first comment of a file that describes it."""
    for line in path.read_text("utf-8", "replace").splitlines():
        text = line.lstrip("# ").strip()
        if not text:
            continue
        if not line.startswith("#"):
            break
        if not text.startswith(_FOR_PROGRAMS):
            return text
    return ""


def key_of(group: str) -> Key | None:
    """Return the key that a group such as `optimizer` is named after, if the schema has it."""
    section: type | None = Config
    key = None
    for name in group.split("/"):
        key = declared(section).get(name) if section else None
        section = key.inner_schema if key else None
    return key


def keys_of(group: str, files: Mapping[str, Path]) -> list[Line]:
    """Return the keys of a group such as `optimizer` or `lr_scheduler/warmup`.

    Their order and their meanings are the schema's, then those of the group's files.
    """
    prefix = group.replace("/", ".")
    key = key_of(group)
    lines = dict[str, Line]()
    if key and key.inner_schema:
        lines = {line.name: line for line in schema_keys(key.inner_schema, prefix)}
    for choice, path in files.items():
        for written in _written(path, prefix):
            line = lines.setdefault(written.name, written)
            line.meaning = line.meaning or written.meaning
            if line.value in ("", "null"):
                line.value = written.value
            line.choices.append(choice)
    return list(lines.values())


def schema_keys(section: type, prefix: str = "") -> Iterator[Line]:
    """Yield the keys of a section and of those inside it, as the schema declares them."""
    for name, key in declared(section).items():
        full_name = join(prefix, name)
        if key.section is not None:
            yield from schema_keys(key.section, full_name)
            continue
        meaning = key.doc
        if not key.node and not key.nested_schema:
            meaning += f" ({describe_type(key)})"
        has_value = key.default is not REQUIRED and not isinstance(key.default, list | dict)
        yield Line(full_name, format_scalar(key.default) if has_value else "", meaning)


def _written(path: Path, prefix: str) -> Iterator[Line]:
    """Yield the keys of a YAML file with the comments behind them."""
    lines = path.read_text("utf-8", "replace").splitlines()
    if any(line.startswith("# @package _global_") for line in lines):
        return
    parents = list[tuple[int, str]]()  # indent and name of the keys around the line
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        indent = len(match[1])
        value = match[3] or ""
        meaning = match[4] or ""
        parents = [parent for parent in parents if parent[0] < indent]
        parents.append((indent, match[2]))
        names = [name for _, name in parents]
        if not _SKIPPED.intersection(names) and (value or meaning):
            yield Line(".".join([prefix, *names]), value, meaning)


# bash splits a word at "=" and replaces only the part behind the last one.
_BASH = """\
_regimen_complete() {
  local IFS=$'\\n'
  COMPREPLY=($(regimen completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _regimen_complete regimen train evaluate predict
"""
# -S '' and -U: zsh inserts the word as it is, without a blank after "=".
_ZSH = """\
_regimen_complete() {
  local -a found whole partial
  found=("${(@f)$(regimen completion zsh --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  found=(${found:#})
  partial=(${(M)found:#*=})
  whole=(${found:#*=})
  (( $#partial )) && compadd -U -S '' -- $partial
  (( $#whole )) && compadd -U -- $whole
  (( $#found )) || _files
}
compdef _regimen_complete regimen train evaluate predict
"""
_FISH = """\
function __regimen_complete
  set -l words (commandline -opc) (commandline -ct)
  regimen completion fish --line (string join ' ' -- $words) 2>/dev/null
end
for name in regimen train evaluate predict
  complete -c $name -a '(__regimen_complete)'
end
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_KEYS_OF_RUNS = ("run", "resume")  # keys whose values are directories of runs
_MAX_RUNS = 200


def completion(argv: Sequence[str]) -> int:
    """Complete groups, choices, keys and directories of runs.

    eval "$(regimen completion bash)"        # in ~/.bashrc, or for this shell
    eval "$(regimen completion zsh)"         # in ~/.zshrc, after compinit
    regimen completion fish | source         # in ~/.config/fish/config.fish
    """
    parser = command_parser("regimen completion", getdoc(completion))
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.add_argument("--line", help=argparse.SUPPRESS)  # what the script asks for
    arguments = parser.parse_intermixed_args(argv)
    if arguments.line is None:
        print(_SCRIPTS[arguments.shell], end="")
        return 0
    # bash replaces the part of the word behind its last "="; the others replace the whole word.
    key, equals, _ = arguments.line.split(" ")[-1].partition("=")
    before = ""
    if equals and arguments.shell != "bash":
        before = f"{key}="
    for completed in completions(arguments.line):
        print(before + completed)
    return 0


def completions(line: str) -> list[str]:
    """Return the completions of the last word of a command line, without the part before `=`."""
    *before, last = line.split(" ")
    words = [text for text in before if text]
    key, equals, value = last.partition("=")
    if words == ["regimen"]:
        return [name for name in COMMANDS if name.startswith(last)]
    folders_of_user = []
    for option, folder in pairwise(words):
        if option in ("--config-dir", "-cd"):
            folders_of_user.append(folder)
    groups = groups_in([*folders_of_user, CONF])
    if not equals:
        names = [*groups, *(key.name for key in schema_keys(Config)), *_KEYS_OF_RUNS]
        return [f"{name}=" for name in dict.fromkeys(names) if name.startswith(last)]
    if key in _KEYS_OF_RUNS:
        runs = (shlex.quote(place) for place, _, files in os.walk("runs") if MANIFEST in files)
        return [run for run in islice(runs, _MAX_RUNS) if run.startswith(value)]
    return [choice for choice in groups.get(key.lstrip("+"), ()) if choice.startswith(value)]
