"""`regimen new DIR`: a small project of your own that trains at once. `regimen cp`: a config."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import command_parser, parse_command
from scripts.cli.shadow import ROOT
from scripts.composition.folders import CONF, check_folder
from scripts.ls import file_of, groups_in
from trainer.files.atomic import storage_error
from trainer.files.layout import on_one_line

_CP = "Copy a config, to change the copy."
_TEMPLATE = ROOT / "template"
_LONGEST = 100  # letters of a name, which becomes a folder's and a package's


def new(argv: Sequence[str]) -> int:
    """Write the project. Raises ConfigError where the folder holds something, StorageError."""
    parser = command_parser("regimen new", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    folder: Path = arguments.folder
    title = folder.resolve().name
    if len(title) > _LONGEST:
        raise ConfigError(Problem("", f"{title[:20]}...: a name has at most {_LONGEST} letters"))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        message = f"{folder} exists and is no empty folder: choose another name"
        raise ConfigError(Problem("", message))
    for name, text in project_files(title, os.path.relpath(ROOT, folder.resolve())).items():
        _write_new(folder / name, text)
        print(on_one_line(folder / name))
    print(f"train it: cd {shlex.quote(str(folder))} && train --config-dir conf experiment=mine")
    return 0


def project_files(title: str, clone: str) -> dict[str, str]:
    """Return the text of each file by its path; `clone`: the folder that Regimen is taken from."""
    from scripts.schema import schema_text

    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "project"
    if name == "regimen":  # a project cannot depend on its own name
        name = "my-regimen"
    files = {
        path.relative_to(_TEMPLATE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(_TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    # TOML's basic strings escape as JSON's do.
    quoted = (json.dumps(text, ensure_ascii=False) for text in (name, clone))
    for place, text in zip(('"NAME"', '"CLONE"'), quoted, strict=True):
        files["pyproject.toml"] = files["pyproject.toml"].replace(place, text)
    files["README.md"] = files["README.md"].replace("TITLE", title).replace("CLONE", clone)
    files[".gitignore"] = "runs/\n.venv/\n__pycache__/\n"
    files["editor/experiment.json"] = schema_text("experiment")
    return files


def cp(argv: Sequence[str]) -> int:
    """Copy the config that a command line names. Raises ConfigError, StorageError."""
    parser = command_parser("regimen cp", _CP)
    parser.add_argument("source", metavar="GROUP/CHOICE")
    parser.add_argument("target", metavar="FILE", help="a new file, or a folder with a / behind")
    parser.add_argument(
        "--config-dir", "-cd", action="append", default=[], type=Path, help="a folder of your own"
    )
    if (arguments := parse_command(parser, argv)) is None:
        return 0
    for folder in arguments.config_dir:
        check_folder(folder, "--config-dir")
    source = file_of(groups_in([*arguments.config_dir, CONF]), arguments.source)
    target = Path(arguments.target)
    if arguments.target.endswith("/") or target.is_dir():
        target /= source.name
    if target.suffix != ".yaml":
        raise ConfigError(Problem("", f"{target}: the name of a config ends in .yaml"))
    _write_new(target, source.read_text(encoding="utf-8"))
    print(f"written to {on_one_line(target)}")
    if use := shown_use(target, arguments.source):
        print(f"use it with: {shlex.join(use)}")
    return 0


def shown_use(path: Path, source: str) -> list[str]:
    """Return the command that picks the copy `path` of `group/choice`.

    Empty if the path does not end with the folders of the group.
    """
    group = source.strip("/").rpartition("/")[0]
    depth = group.count("/") + 1
    if "/".join(path.absolute().parent.parts[-depth:]) != group:
        return []
    root, here = path.absolute().parents[depth], Path.cwd()
    shown = root.relative_to(here) if root.is_relative_to(here) else root
    return ["train", "--config-dir", str(shown), f"{group}={path.stem}"]


def _write_new(path: Path, text: str) -> None:
    # Never over a file that exists.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        message = f"{error.filename} exists: choose another name"
        raise ConfigError(Problem("", message)) from None
    except OSError as error:
        raise storage_error(path, error) from error
