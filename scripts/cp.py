"""`regimen cp GROUP/CHOICE FILE`: copy a config, to change the copy."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError, Problem
from scripts.catalog.copying import shown_use, write_new
from scripts.catalog.groups import file_of, groups_in
from scripts.catalog.json_schema import outside
from scripts.cli.arguments import command_parser, parse_command
from scripts.composition.sources import CONF, check_folder
from trainer.files.log_format import on_one_line


def cp(argv: Sequence[str]) -> int:
    """Copy one file. Raises ConfigError, also where the target exists, and StorageError."""
    arguments = parse_command(_parser(), argv)
    if arguments is None:
        return 0
    for folder in arguments.config_dir:
        check_folder(folder, "--config-dir")
    source = file_of(groups_in([*arguments.config_dir, CONF]), arguments.source)
    target = Path(arguments.target)
    if arguments.target.endswith("/") or target.is_dir():
        target /= source.name
    if target.suffix != ".yaml":
        raise ConfigError(Problem("", f"{target}: the name of a config ends in .yaml"))
    text = source.read_text(encoding="utf-8")
    if source.is_relative_to(CONF):
        text = outside(text, source.parent.relative_to(CONF).as_posix())
    write_new(target, text)
    print(f"written to {on_one_line(target)}")
    use = shown_use(target, arguments.source)
    if use:
        print(f"use it with: {shlex.join(use)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("regimen cp", __doc__)
    parser.add_argument("source", help="such as experiment/resnet18; `regimen ls` lists them")
    parser.add_argument("target", help="a new .yaml file, or a folder; missing folders are made")
    parser.add_argument(
        "--config-dir", "-cd", action="append", default=[], type=Path, help="a folder of your own"
    )
    return parser
