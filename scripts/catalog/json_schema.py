"""The JSON schemas of the shipped groups, and the line by which a YAML file names its schema."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError, Problem, did_you_mean
from conf.json_schema import Schema, configuration, file_of_group
from scripts.catalog.groups import groups_in
from scripts.composition.argument_names import OWN_KEYS, SPECIAL, accepted

CONF = Path(__file__).resolve().parents[2] / "conf"
FOLDER = CONF / "editor"  # one file for each group
LINE = "# yaml-language-server: $schema="
# Arguments in other packages change with the installed version.
_OURS = ("models.", "data.", "trainer.", "callbacks.")


def schema_text(group: str | None) -> str:
    """Return the schema of a group's files as JSON; None is the whole configuration.

    Raises ConfigError if there is no such group.
    """
    groups = [*groups_in([CONF])]
    name = None if group is None else group.strip("/")
    if name is not None and name not in groups:
        hint = did_you_mean(name, groups) or f"groups: {', '.join(groups)}"
        raise ConfigError(Problem("", f"there is no group {name!r}", hint))
    targets = shipped_targets()
    found: Schema = configuration(targets) if name is None else file_of_group(name, targets)
    return json.dumps(found, indent=1) + "\n"


@cache
def shipped_targets() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return, by section, our targets in the shipped files, and their arguments."""
    named: dict[str, set[str]] = {}
    for path in sorted(CONF.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        group = path.relative_to(CONF).parts[0]
        for top, target in _targets(content, group):
            named.setdefault(top, set()).add(target)
    found = {}
    for top, targets in sorted(named.items()):
        own = [name for section in (top, "lr_scheduler") for name in OWN_KEYS.get(section, ())]
        beside = (*SPECIAL, *(own if top in OWN_KEYS else ()))
        taken = ((target, accepted(target)) for target in sorted(targets))
        found[top] = {target: (*names, *beside) for target, names in taken if names is not None}
    return found


def _targets(node: Any, top: str) -> Iterator[tuple[str, str]]:
    """Yield the section and the path of each target; an experiment's first keys are sections."""
    if isinstance(node, dict):
        target = node.get("_target_")
        if isinstance(target, str) and target.startswith(_OURS):
            yield top, target
        for name, child in node.items():
            yield from _targets(child, name if top in ("experiment", "debug") else top)
    elif isinstance(node, list):
        for child in node:
            yield from _targets(child, top)


def schema_files() -> dict[Path, str]:
    """Return what the files of FOLDER should hold."""
    groups: list[str | None] = [None, *groups_in([CONF])]
    return {FOLDER / file_name(group): schema_text(group) for group in groups}


def file_name(group: str | None) -> str:
    """Return the name of a group's schema in FOLDER."""
    return f"{(group or 'configuration').replace('/', '.')}.json"


def with_line(text: str, schema: str) -> str:
    """Return a YAML file's text with the line that names its schema as the second one.

    A path with a blank cannot be in that line: the text is returned without it.
    """
    first, *rest = text.splitlines(keepends=True)
    rest = [line for line in rest if not line.startswith(LINE)]
    return "".join([first, *([] if " " in schema else [f"{LINE}{schema}\n"]), *rest])


def outside(text: str, group: str) -> str:
    """Return the text of a group's file for a folder outside the shipped one."""
    return with_line(text, str(FOLDER / file_name(group)))


def schema_of(path: Path) -> str:
    """Return the schema of a shipped file, relative to its folder."""
    place = path.relative_to(CONF).parent
    # train.yaml is a piece with any key of the root, as an experiment is.
    name = file_name("experiment" if place == Path() else place.as_posix())
    return "../" * len(place.parts) + f"editor/{name}"
