"""`regimen new DIR`: a small project of your own that trains at once."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError, Problem
from scripts.catalog.copying import write_new
from scripts.catalog.project import project_files
from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.shadow import ROOT
from trainer.files.log_format import on_one_line


def new(argv: Sequence[str]) -> int:
    """Write the project. Raises ConfigError where the folder holds something, StorageError."""
    parser = command_parser("regimen new", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    folder: Path = arguments.folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        message = f"{folder} exists and is no empty folder: choose another name"
        raise ConfigError(Problem("", message))
    for name, text in project_files(folder.resolve().name, str(ROOT)).items():
        write_new(folder / name, text)
        print(on_one_line(folder / name))
    print(f"train it: cd {shlex.quote(str(folder))} && train --config-dir conf experiment=mine")
    return 0
