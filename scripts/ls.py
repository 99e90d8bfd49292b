"""`regimen ls [GROUP]`: the groups of configs, their choices, and what each is for."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.catalog.groups import below, description, groups_in
from scripts.cli.arguments import command_parser, parse_command
from scripts.composition.sources import CONF, check_folder
from trainer.files.log_format import on_one_line


def ls(argv: Sequence[str]) -> int:
    """Print the groups that a command line asks for. Raises ConfigError."""
    arguments = parse_command(_parser(), argv)
    if arguments is None:
        return 0
    for folder in arguments.config_dir:
        check_folder(folder, "--config-dir")
    groups = groups_in([*arguments.config_dir, CONF])
    if arguments.group:
        groups = below(groups, arguments.group)
    print(on_screen(groups), end="")
    return 0


def on_screen(groups: dict[str, dict[str, Path]]) -> str:
    """Return a block of lines for each group; a file that is not shipped is shown with its path."""
    lines = []
    for group, files in groups.items():
        width = max(map(len, files))
        lines.append(group)
        for choice, path in files.items():
            place = "" if path.is_relative_to(CONF) else f" ({path})"
            text = on_one_line(f"  {choice:<{width}}  {description(path)}{place}")
            lines.append(text.rstrip())
    return "".join(f"{line}\n" for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("regimen ls", __doc__)
    parser.add_argument("group", nargs="?", help="only this group and those inside it: task, model")
    parser.add_argument(
        "--config-dir", "-cd", action="append", default=[], type=Path, help="a folder of your own"
    )
    return parser
