"""`regimen ls [GROUP]`: the groups of configs, their choices, and what each is for."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conf.errors import ConfigError, Problem, did_you_mean
from scripts.cli.arguments import command_parser, parse_command
from scripts.composition.folders import CONF, check_folder
from trainer.files.layout import on_one_line

# Comments that are no description: commands, and lines for Hydra and editors.
_FOR_PROGRAMS = ("train ", "torchrun ", "python ", "@package", "yaml-language-server:")


def ls(argv: Sequence[str]) -> int:
    """Print the groups that a command line asks for. Raises ConfigError."""
    parser = command_parser("regimen ls", __doc__)
    parser.add_argument("group", nargs="?", help="only this group and those inside it: task, model")
    parser.add_argument(
        "--config-dir", "-cd", action="append", default=[], type=Path, help="a folder of your own"
    )
    if (arguments := parse_command(parser, argv)) is None:
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


def groups_in(folders: Iterable[str | Path]) -> dict[str, dict[str, Path]]:
    """Return the choices of each group with their files; the first folder that has one wins."""
    groups: dict[str, dict[str, Path]] = {}
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group != ".":
                groups.setdefault(group, {}).setdefault(path.stem, path)
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}


def below(groups: dict[str, dict[str, Path]], name: str) -> dict[str, dict[str, Path]]:
    """Return the group `name` and those inside it. Raises ConfigError if there is none."""
    name = name.strip("/")
    found = {g: files for g, files in groups.items() if g == name or g.startswith(f"{name}/")}
    if not found:
        hint = did_you_mean(name, list(groups)) or f"groups: {', '.join(groups)}"
        raise ConfigError(Problem("", f"there is no group {name!r}", hint))
    return found


def file_of(groups: dict[str, dict[str, Path]], name: str) -> Path:
    """Return the file of `group/choice`. Raises ConfigError if there is none."""
    group, _, choice = name.removesuffix(".yaml").strip("/").rpartition("/")
    files = groups.get(group, {})
    if choice not in files:
        known = [f"{g}/{c}" for g, files in groups.items() for c in files]
        inside = f"{group} has {', '.join(files)}" if files else "`regimen ls` lists them"
        hint = did_you_mean(name, known) or inside
        raise ConfigError(Problem("", f"there is no config {name!r}: name group/choice", hint))
    return files[choice]


def description(path: Path) -> str:
    """Return the first comment of a file that is a description."""
    return next(_remarks(path), "")


def _remarks(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return
        text = line.lstrip("# ").strip()
        if text and not text.startswith(_FOR_PROGRAMS):
            yield text
