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
from regimen.conf.yaml_file import word
from regimen.scripts.cli.arguments import Arguments, command_parser, parser
from regimen.scripts.commands import COMMANDS
from regimen.scripts.composition.compose import config_text, print_by_hydra
from regimen.scripts.composition.folders import CONF
from regimen.trainer.runs.status import MANIFEST

_WIDTH = 96
_LINE = re.compile(r"( *)([\w-]+):(?: +([^#]*?))? *(?:# *(.*))?$")
_SKIPPED = {"_target_", "defaults", "_partial_", "_args_"}
# Comments that are no description: commands, and lines for Hydra and editors.
_FOR_PROGRAMS = ("train ", "pip ", "torchrun ", "python ", "@package", "yaml-language-server:")
Groups = dict[str, dict[str, Path]]  # the file of each choice of each group


@dataclass(slots=True)
class Line:
    """One key: its value by default, what it means, and the choices whose files have it."""

    name: str
    value: str
    meaning: str
    choices: list[str] = field(default_factory=list)

    def told(self, count: int) -> str:
        """Return it as text; `count`: of the group's choices."""
        value, meaning = f"={self.value}" if self.value else "", f"  {self.meaning}".rstrip()
        of = f" [{', '.join(self.choices)}]" if 0 < len(self.choices) < count else ""
        return _filled(f"{self.name}{value}{meaning}{of}")


def answer(arguments: Arguments) -> None:
    """Print what was asked for instead of a run. Raises ConfigError."""
    if arguments.help:
        groups = groups_in([*arguments.config_dirs, arguments.config_path or CONF])
        topics = [text for text in arguments.overrides if "=" not in text]
        print("\n".join(topic_text(groups, topic) for topic in topics) or help_text(groups))
    elif arguments.version:
        print(f"Regimen {installed_version()} (Hydra {metadata.version('hydra-core')})")
    elif arguments.cfg == "job":
        text, problems = config_text(arguments)
        print(text, end="", flush=True)  # before its mistakes, wherever both go
        if problems:
            raise ConfigError(problems)
    elif arguments.cfg:
        print_by_hydra(arguments)
    else:
        completion([text.removeprefix("install=") for text in arguments.overrides])


def help_text(groups: Groups) -> str:
    """Return the help: usage, experiments, groups with their choices, options."""
    usage, _, grammar = str(getdoc(Arguments)).partition("\nOverrides:\n")
    parts = [usage, "Experiments (experiment=...):", *_described(groups.get("experiment", {}))]
    parts += ["", "Groups (group=choice):"]
    parts += [_filled(f"{g}: {', '.join(groups[g])}") for g in groups if g != "experiment"]
    options = parser().format_help().partition("\noptions:\n")[2]
    return "\n".join([*parts, "", "Overrides:", f"{grammar}\n\nOptions:\n{options.rstrip()}"])


def topic_text(groups: Groups, topic: str) -> str:
    """Return a group's choices and the meaning of its keys; of `trainer.precision` only that key.

    Raises ConfigError for a group or a key that does not exist.
    """
    group, _, rest = topic.partition(".")
    parts = []
    lines = dict[str, str]()
    for name, files in below(groups, group).items():
        told = {one.name: one.told(len(files)) for one in keys_of(name, files)}
        parts += [f"{name}=CHOICE:", *_described(files), *told.values(), ""]
        lines |= told
    if rest:
        key = topic.strip("/").replace("/", ".")
        parts = [line for name, line in lines.items() if f"{name}.".startswith(f"{key}.")]
    if not parts:
        raise ConfigError(topic, "there is no such key", did_you_mean(topic, lines))
    return "\n".join(parts)


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
    found = {g: files for g, files in groups.items() if g == name or g.startswith(f"{name}/")}
    if not found:
        hint = did_you_mean(name, list(groups)) or f"groups: {', '.join(groups)}"
        raise ConfigError("", f"there is no group {name!r}", hint)
    return found


def description(path: Path) -> str:
    """Return the first comment of a file that describes it."""
    for line in path.read_text("utf-8", "replace").splitlines():
        text = line.lstrip("# ").strip()
        if text and not line.startswith("#"):
            break
        if text and not text.startswith(_FOR_PROGRAMS):
            return text
    return ""


def key_of(group: str) -> Key | None:
    """Return the key that a group such as `optimizer` is named after, if the schema has it."""
    section: type | None = Config
    for name in group.split("/"):
        one = declared(section).get(name) if section else None
        section = one.inner_schema if one else None
    return one


def keys_of(group: str, files: Mapping[str, Path]) -> list[Line]:
    """Return the keys of a group such as `optimizer` or `lr_scheduler/warmup`."""
    prefix, key = group.replace("/", "."), key_of(group)
    within = key.inner_schema if key else None
    found = {one.name: one for one in schema_keys(within, prefix)} if within else {}
    for choice, path in files.items():
        for one in _written(path, prefix):
            known = found.setdefault(one.name, one)
            known.meaning = known.meaning or one.meaning
            known.value = one.value if known.value in ("", "null") else known.value
            known.choices.append(choice)
    return list(found.values())


def schema_keys(section: type, prefix: str = "") -> Iterator[Line]:
    """Yield the keys of a section and of those inside it, as the schema declares them."""
    for name, one in declared(section).items():
        if one.section is not None:
            yield from schema_keys(one.section, join(prefix, name))
            continue
        takes = "" if one.node or one.nested_schema else f" ({describe_type(one)})"
        shown = one.default is not REQUIRED and not isinstance(one.default, list | dict)
        yield Line(join(prefix, name), word(one.default) if shown else "", f"{one.doc}{takes}")


def _written(path: Path, prefix: str) -> Iterator[Line]:
    """Yield the keys of a YAML file with the comments behind them."""
    lines = path.read_text("utf-8", "replace").splitlines()
    if any(line.startswith("# @package _global_") for line in lines):
        return
    parents = list[tuple[int, str]]()
    for line in lines:
        if (match := _LINE.match(line)) is None:
            continue
        indent, name, value, meaning = len(match[1]), match[2], match[3] or "", match[4] or ""
        parents = [*((i, n) for i, n in parents if i < indent), (indent, name)]
        path_in_file = [n for _, n in parents]
        if not _SKIPPED.intersection(path_in_file) and (value or meaning):
            yield Line(".".join([prefix, *path_in_file]), value, meaning)


# bash splits a word at "=", so only what follows the last one is replaced.
_BASH = """\
_regimen_complete() {
  local IFS=$'\\n'
  COMPREPLY=($(regimen completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _regimen_complete regimen train evaluate predict
"""
# -S '' and -U: the word is replaced as it is, without a blank after "=".
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
_OF_RUNS = ("run", "resume")
_MOST_RUNS = 200


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
    # bash has taken the word apart at its last "="; the others replace the whole word
    key, equals, _ = arguments.line.split(" ")[-1].partition("=")
    before = key + equals if equals and arguments.shell != "bash" else ""
    for found in completions(arguments.line):
        print(before + found)
    return 0


def completions(line: str) -> list[str]:
    """Return the completions of the last word of a command line, without the part before `=`."""
    *before, last = line.split(" ")
    words = [text for text in before if text]
    key, equals, value = last.partition("=")
    own = [folder for option, folder in pairwise(words) if option in ("--config-dir", "-cd")]
    groups = groups_in([*own, CONF])
    if words == ["regimen"]:
        return [name for name in COMMANDS if name.startswith(last)]
    if not equals:
        names = [*groups, *(known.name for known in schema_keys(Config)), *_OF_RUNS]
        return [f"{name}=" for name in dict.fromkeys(names) if name.startswith(last)]
    if key in _OF_RUNS:
        runs = (place for place, _, files in os.walk("runs") if MANIFEST in files)
        return [w for w in map(shlex.quote, islice(runs, _MOST_RUNS)) if w.startswith(value)]
    return [choice for choice in groups.get(key.lstrip("+"), ()) if choice.startswith(value)]
