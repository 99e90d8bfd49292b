"""What Hydra's errors about defaults lists mean: the file and line, and what to write instead.

Hydra names the group, or nothing. The mistake is looked for in the files that were read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from conf.check import check
from conf.errors import Problem, did_you_mean
from conf.yaml_file import Document, plain_values
from scripts.composition.origins import shown_path
from scripts.composition.overrides import ConfigGroups
from scripts.composition.trees import first_lines

_TWICE = re.compile(
    r"(?:(\S+) appears more than once in the final defaults list|Multiple values for (\S+)\.)"
)
_NO_MATCH = re.compile(r"Could not override '([^'@]+)")
_ENTRY = re.compile(r"defaults\.\d+\.(.+)")  # a key of `Document.lines`: `group: choice`


def meant(
    error: Exception, documents: Mapping[Path, Document], groups: ConfigGroups, config_name: str
) -> Problem:
    """Return the mistake that an error of Hydra's composition stands for.

    Where it is none of the known ones, Hydra's own message is returned in one line.
    """
    text = first_lines(error)
    if isinstance(error, RecursionError):
        return _circle(documents)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == config_name:
        return Problem("", text, hint=did_you_mean(config_name, groups.get_group_options("")))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing(error.missing_cfg_file, documents, groups) or Problem("", text)
    if found := _TWICE.search(text):
        return _chosen_twice(found[1] or found[2], documents) or Problem("", text)
    if text.startswith("In ") and (found := _NO_MATCH.search(text)):
        return _overridden(found[1], documents, groups) or Problem("", text)
    if "Cannot merge" in text:
        return _of_another_kind(documents) or Problem("", text)
    return Problem("", text)


def _circle(documents: Mapping[Path, Document]) -> Problem:
    files = [shown_path(path) for path, one in documents.items() if "defaults" in one.lines]
    return Problem("defaults", "a list leads back to its own file", file=", ".join(files[1:]))


def _missing(
    missing: str, documents: Mapping[Path, Document], groups: ConfigGroups
) -> Problem | None:
    folder, _, choice = missing.rpartition("/")
    for words, place, path in reversed(list(_entries(documents))):
        group = words[-1].partition("@")[0]
        beside = str(path.parent / group)
        if folder != group.lstrip("/") and not beside.endswith(f"/{folder}"):
            continue
        if folder == group.lstrip("/") or not groups.group_exists(group):
            hint = did_you_mean(choice, groups.get_group_options(folder))
            return Problem("defaults", f"there is no {missing}.yaml", hint, place)
        way = f"write `override /{group}: {choice}`"
        message = f"`{group}: {choice}` asks for {missing}.yaml, beside this file"
        return Problem("defaults", message, way, place)
    return None


def _chosen_twice(group: str, documents: Mapping[Path, Document]) -> Problem | None:
    for words, place, _ in reversed(list(_entries(documents))):
        if words[-1].lstrip("/") == group and "override" not in words:
            way = f"write `override /{group}: ...`"
            return Problem("defaults", f"{group} has a choice already", way, place)
    return None


def _overridden(
    group: str, documents: Mapping[Path, Document], groups: ConfigGroups
) -> Problem | None:
    known = {words[-1].lstrip("/").partition("@")[0] for words, _, _ in _entries(documents)}
    for words, place, _ in _entries(documents):
        named = words[-1].partition("@")[0]
        if "override" not in words or not f"/{group}".endswith(f"/{named.lstrip('/')}"):
            continue
        if not named.startswith("/") and groups.group_exists(named):
            way: str | None = f"write `override /{named}: ...`, with a slash"
        elif groups.group_exists(named.lstrip("/")):
            way = f"write `{named}: ...`, without the word override"
        else:
            way = did_you_mean(named.lstrip("/"), known - {named.lstrip("/")})
        return Problem("defaults", f"`override {named}`: there is no choice to replace", way, place)
    return None


def _of_another_kind(documents: Mapping[Path, Document]) -> Problem | None:
    """Find a list where a section stands in the schema, or a section where a list does."""
    for path, document in documents.items():
        if document.package != "_global_":
            continue
        values = plain_values(path.read_text("utf-8-sig"), shown_path(path))
        for problem in check(OmegaConf.to_container(OmegaConf.create(values))):  # type: ignore[arg-type]
            if problem.key in document.lines and problem.message.startswith("expected"):
                line = document.lines[problem.key]
                return Problem(
                    problem.key, problem.message, problem.hint, f"{shown_path(path)}:{line}"
                )
    return None


def _entries(documents: Mapping[Path, Document]) -> Iterator[tuple[list[str], str, Path]]:
    """Yield the words before each choice of a defaults list, its file and line, and the file."""
    for path, document in documents.items():
        for key, line in document.lines.items():
            if (found := _ENTRY.fullmatch(key)) and found[1].split():
                yield found[1].split(), f"{shown_path(path)}:{line}", path
