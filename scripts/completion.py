"""`regimen completion SHELL`: completes groups, choices, keys and directories of runs.

eval "$(regimen completion bash)"        # in ~/.bashrc, or for this shell
eval "$(regimen completion zsh)"         # in ~/.zshrc, after compinit
regimen completion fish | source         # in ~/.config/fish/config.fish
"""

import argparse
import os
import shlex
import typing
from collections.abc import Iterator, Sequence
from itertools import pairwise

from conf.fields import dataclass_in, declared
from conf.schema import Config
from scripts.cli.arguments import command_parser, parse_command
from scripts.composition.folders import CONF
from scripts.ls import groups_in
from trainer.runs.status import MANIFEST

# bash splits a word at "=", so only what follows the last one is replaced.
BASH = """\
_regimen_complete() {
  local IFS=$'\\n'
  COMPREPLY=($(regimen completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _regimen_complete regimen train evaluate predict
"""
# -S '' and -U: the word is replaced as it is, without a blank after "=".
ZSH = """\
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
FISH = """\
function __regimen_complete
  set -l words (commandline -opc) (commandline -ct)
  regimen completion fish --line (string join ' ' -- $words) 2>/dev/null
end
for name in regimen train evaluate predict
  complete -c $name -a '(__regimen_complete)'
end
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_OF_RUNS = ("run", "resume")
_MOST_RUNS = 200


def completion(argv: Sequence[str]) -> int:
    """Print the script for a shell, or what that asks for. Raises ConfigError."""
    parser = command_parser("regimen completion", __doc__)
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    parser.add_argument("--line", help=argparse.SUPPRESS)  # what the script asks for
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    if arguments.line is None:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    from scripts.regimen import COMMANDS

    # bash has taken the word apart at its last "="; the others replace the whole word
    key, equals, _ = arguments.line.split(" ")[-1].partition("=")
    before = key + equals if equals and arguments.shell != "bash" else ""
    for word in completions(arguments.line, list(COMMANDS)):
        print(before + word)
    return 0


def completions(line: str, commands: Sequence[str]) -> list[str]:
    """Return the completions of the last word of a command line, without the part before `=`."""
    *before, word = line.split(" ")
    words = [text for text in before if text]
    if words == ["regimen"]:
        return [name for name in commands if name.startswith(word)]
    key, equals, value = word.partition("=")
    groups = groups_in([*_config_dirs(words), CONF])
    if not equals:
        names = [*groups, *_keys(Config), *_OF_RUNS]
        return [f"{name}=" for name in dict.fromkeys(names) if name.startswith(word)]
    known = map(shlex.quote, _runs()) if key in _OF_RUNS else groups.get(key.lstrip("+"), ())
    return [choice for choice in known if choice.startswith(value)]


def _config_dirs(words: Sequence[str]) -> list[str]:
    return [folder for option, folder in pairwise(words) if option in ("--config-dir", "-cd")]


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(schema)
    for name in declared(schema):
        section = dataclass_in(hints[name])
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from _keys(section, f"{prefix}{name}.")


def _runs() -> Iterator[str]:
    found = (place for place, _, files in os.walk("runs") if MANIFEST in files)
    for _, place in zip(range(_MOST_RUNS), found, strict=False):
        yield place
