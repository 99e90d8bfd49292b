"""`regimen completion SHELL`: completes groups, choices, keys and directories of runs.

eval "$(regimen completion bash)"        # in ~/.bashrc, or for this shell
eval "$(regimen completion zsh)"         # in ~/.zshrc, after compinit
regimen completion fish | source         # in ~/.config/fish/config.fish
"""

import argparse
from collections.abc import Sequence

from scripts.catalog.completion import SCRIPTS, completions, key_of
from scripts.cli.arguments import command_parser, parse_command


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
    before = "" if arguments.shell == "bash" else key_of(arguments.line)
    for word in completions(arguments.line, list(COMMANDS)):
        print(before + word)
    return 0
