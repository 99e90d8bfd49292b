"""`regimen schema [GROUP]`: the JSON schema of a configuration, or of the files of a group.

For a folder of your own: `regimen schema experiment > schema.json`, and in each file the line
`# yaml-language-server: $schema=PATH_TO/schema.json`, by which editors complete and check keys.
"""

import argparse
import sys
from collections.abc import Sequence

from scripts.catalog.json_schema import (
    CONF,
    FOLDER,
    schema_files,
    schema_of,
    schema_text,
    with_line,
)
from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.console import Command


def main() -> None:
    """Run the command line and leave with its exit code."""
    with Command() as command:
        command.code = schema(sys.argv[1:])


def schema(argv: Sequence[str]) -> int:
    """Print the schema that a command line asks for. Raises ConfigError."""
    parser = command_parser("regimen schema", __doc__)
    parser.add_argument("group", nargs="?", help="optimizer, task/loss, experiment, ...")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    if arguments.write:
        write()
    else:
        print(schema_text(arguments.group), end="")
    return 0


def write() -> None:
    """Refresh the schemas in conf/editor, and the line in each shipped file that names one."""
    FOLDER.mkdir(exist_ok=True)
    files = schema_files()
    for stale in set(FOLDER.glob("*.json")) - set(files):
        stale.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    for path in CONF.rglob("*.yaml"):
        path.write_text(
            with_line(path.read_text(encoding="utf-8"), schema_of(path)), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
