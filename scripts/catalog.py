"""`regimen ls` lists the configs, `regimen cp` copies one, `regimen new DIR` begins a project."""

import argparse
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from regimen.conf.errors import ConfigError, did_you_mean, one_line
from regimen.conf.layout import ROOT, installed_from, is_checkout
from regimen.scripts.cli.arguments import command_parser
from regimen.scripts.cli.files import make_above, write_new
from regimen.scripts.commands import COMMANDS
from regimen.scripts.composition.folders import CONF, check_folder
from regimen.scripts.help import Groups, below, description, groups_in
from regimen.trainer.files.atomic import TEMPORARY, remove_orphans, storing

_TEMPLATE = ROOT / "template"
_LONGEST_NAME = 100  # letters; the name becomes a folder's and a package's


def ls(argv: Sequence[str]) -> int:
    """Run `regimen ls`, return its exit code. Raises ConfigError."""
    parser = _parser("ls")
    parser.add_argument("group", nargs="?", help="only this group and those inside it: task, model")
    arguments = parser.parse_intermixed_args(argv)
    groups = _groups(arguments)
    if arguments.group:
        groups = below(groups, arguments.group)
    for group, files in groups.items():
        width = max(map(len, files))
        print(group)
        for choice, path in files.items():
            place = "" if path.is_relative_to(CONF) else f" ({path})"
            print(one_line(f"  {choice:<{width}}  {description(path)}{place}").rstrip())
    return 0


def cp(argv: Sequence[str]) -> int:
    """Run `regimen cp`, return its exit code. Raises ConfigError, StorageError."""
    parser = _parser("cp")
    parser.add_argument("source", metavar="GROUP/CHOICE")
    parser.add_argument("target", metavar="FILE", help="a new file, or a folder with a / behind")
    arguments = parser.parse_intermixed_args(argv)
    groups = _groups(arguments)
    group, _, choice = arguments.source.removesuffix(".yaml").strip("/").rpartition("/")
    files = groups.get(group, {})
    if choice not in files:
        names = [f"{group}/{choice}" for group, files in groups.items() for choice in files]
        raise ConfigError(
            "",
            f"there is no config {arguments.source!r}: name group/choice, as `regimen ls`",
            did_you_mean(arguments.source, names),
        )
    target = Path(arguments.target)
    if arguments.target.endswith("/") or target.is_dir():
        target /= files[choice].name
    if target.suffix != ".yaml":
        raise ConfigError(f"{target}: the name of a config ends in .yaml")
    write_new(target, files[choice].read_text("utf-8"))
    print(f"written to {one_line(target)}")
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = command_parser(f"regimen {command}", COMMANDS[command][1])
    parser.add_argument(
        "--config-dir", "-cd", action="append", default=[], help="a folder of your own"
    )
    return parser


def _groups(arguments: argparse.Namespace) -> Groups:
    for folder in arguments.config_dir:
        check_folder(folder, "--config-dir")
    return groups_in([*arguments.config_dir, CONF])


def new(argv: Sequence[str]) -> int:
    """Run `regimen new`, return its exit code.

    Raises ConfigError if the folder is not empty, StorageError.
    """
    parser = command_parser("regimen new", COMMANDS["new"][1])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    arguments = parser.parse_intermixed_args(argv)
    folder: Path = arguments.folder
    title = folder.resolve().name
    if len(title) > _LONGEST_NAME:
        raise ConfigError(f"{title[:20]}...: a name has at most {_LONGEST_NAME} letters")
    if os.path.lexists(folder) and not (folder.is_dir() and _is_empty(folder)):
        raise ConfigError(f"{folder} exists and is no empty folder: choose another name")
    texts = project_files(title, _source(folder))
    make_above(folder)
    _write_project(folder, texts)
    for name in texts:
        print(one_line(folder / name))
    print(f"train it: cd {shlex.quote(str(folder))} && train --config-dir conf experiment=mine")
    return 0


def _write_project(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files of a project, or none of them: half a project would refuse the next try."""
    temporary = folder / f"{TEMPORARY}project"
    with storing(folder):
        folder.mkdir(exist_ok=True)
        remove_orphans(folder)  # of a command that was killed
        try:
            for name, text in texts.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                (temporary / name).write_text(text, "utf-8")
            for path in sorted(temporary.iterdir()):
                os.replace(path, folder / path.name)
        finally:
            remove_orphans(folder)


def _is_empty(folder: Path) -> bool:
    """Return whether a folder holds nothing but leftovers of a command that was killed."""
    with storing(folder):
        return all(path.name.startswith(TEMPORARY) for path in folder.iterdir())


def _source(project: Path) -> dict[str, Any]:
    """Return where a new project takes Regimen from, in uv's words; {} is the package index."""
    if is_checkout():
        return {"path": os.path.relpath(ROOT, project.resolve()), "editable": True}
    record = installed_from()
    url = str(record.get("url", ""))
    if "vcs_info" in record:
        return {"git": url, "rev": record["vcs_info"]["commit_id"]}
    if url.startswith("file://"):
        return {"path": unquote(urlsplit(url).path)}
    return {"url": url} if url else {}


def project_files(title: str, source: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each file by its path; `source`: where Regimen is taken from, as uv's."""
    from regimen.scripts.schema import schema_text

    files = {}
    for path in sorted(_TEMPLATE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[path.relative_to(_TEMPLATE).as_posix()] = path.read_text("utf-8")
    files["pyproject.toml"] = _project_table(files["pyproject.toml"], title, source)
    files["README.md"] = files["README.md"].replace("TITLE", title)
    files[".gitignore"] = "runs/\n.venv/\n__pycache__/\n"
    files["editor/experiment.json"] = schema_text("experiment")
    return files


def _project_table(text: str, title: str, source: Mapping[str, Any]) -> str:
    """Fill in the template of `pyproject.toml`."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "project"
    if name == "regimen":  # a project cannot depend on its own name
        name = "my-regimen"
    text = text.replace('"NAME"', json.dumps(name))
    if not source:
        return text.replace('[tool.uv.sources]\ntorch-regimen = { path = "SOURCE" }\n\n', "")
    # TOML's basic strings and truth values are written like those of JSON.
    fields = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in source.items()]
    return text.replace('{ path = "SOURCE" }', f"{{ {', '.join(fields)} }}")
