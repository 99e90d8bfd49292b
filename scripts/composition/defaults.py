"""Defaults lists that Hydra refuses: the file and line of the mistake, and what to write instead.

Hydra names the group, or nothing. The mistake is looked for in the files that were read.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from hydra.errors import MissingConfigException

from conf.errors import Problem, did_you_mean
from scripts.composition.folders import Folders
from scripts.composition.overrides import first_lines
from scripts.composition.tree import shown_path

_TWICE = re.compile(
    r"(?:(\S+) appears more than once in the final defaults list|Multiple values for (\S+)\.)"
)
_NO_MATCH = re.compile(r"In .*Could not override '([^'@]+)", re.DOTALL)
_ENTRY = re.compile(r"defaults\.\d+\.(.+)")  # a key of `Document.lines`: `group: choice`


def meant(error: Exception, folders: Folders, config_name: str) -> Problem:
    """Return the mistake that an error of Hydra's composition stands for.

    Where it is none of the known ones, Hydra's own message is returned in one line.
    """
    text = first_lines(error)
    found = None
    if isinstance(error, RecursionError):
        lists = [shown_path(p) for p, one in folders.documents.items() if "defaults" in one.lines]
        return Problem("defaults", "a list leads back to its own file", file=", ".join(lists[1:]))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        if error.missing_cfg_file == config_name:
            return Problem("", text, did_you_mean(config_name, folders.options("")))
        found = _missing(error.missing_cfg_file, folders)
    elif twice := _TWICE.search(text):
        group = twice[1] or twice[2]
        for words, place, _ in reversed(list(_entries(folders))):
            if words[-1].lstrip("/") == group and "override" not in words:
                way = f"write `override /{group}: ...`"
                return Problem("defaults", f"{group} has a choice already", way, place)
    elif unmatched := _NO_MATCH.match(text):
        found = _overridden(unmatched[1], folders)
    return found or Problem("", text)


def _missing(missing: str, folders: Folders) -> Problem | None:
    folder, _, choice = missing.rpartition("/")
    for words, place, path in reversed(list(_entries(folders))):
        group = words[-1].partition("@")[0]
        named = folder == group.lstrip("/")
        if named or f"{path.parent}/{group}".endswith(f"/{folder}"):
            if named or not folders.is_group(group):
                hint = did_you_mean(choice, folders.options(folder))
                return Problem("defaults", f"there is no {missing}.yaml", hint, place)
            message = f"`{group}: {choice}` asks for {missing}.yaml, beside this file"
            return Problem("defaults", message, f"write `override /{group}: {choice}`", place)
    return None


def _overridden(group: str, folders: Folders) -> Problem | None:
    known = {words[-1].lstrip("/").partition("@")[0] for words, _, _ in _entries(folders)}
    for words, place, _ in _entries(folders):
        named = words[-1].partition("@")[0]
        plain = named.lstrip("/")
        if "override" not in words or not f"/{group}".endswith(f"/{plain}"):
            continue
        way = did_you_mean(plain, known - {plain})
        if folders.is_group(plain):
            slash = f"write `override /{named}: ...`, with a slash"
            way = f"write `{named}: ...`, without the word override" if plain != named else slash
        return Problem("defaults", f"`override {named}`: there is no choice to replace", way, place)
    return None


def _entries(folders: Folders) -> Iterator[tuple[list[str], str, Path]]:
    """Yield the words before each choice of a defaults list, its file and line, and the file."""
    for path, document in folders.documents.items():
        for key, line in document.lines.items():
            if (found := _ENTRY.fullmatch(key)) and found[1].split():
                yield found[1].split(), f"{shown_path(path)}:{line}", path
