"""The command line: the options of Hydra, and ours."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from conf.errors import ConfigError, Problem
from conf.fields import declared
from conf.other_words import our_key
from conf.schema import Config

PRIMARY = "train"
MAX_OVERRIDE = 8_000  # characters; Hydra's parser takes a second for a list of this length
MAX_BRACKETS = 20  # open at once
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line."""

    overrides: tuple[str, ...] = ()
    multirun: bool = False
    config_name: str = PRIMARY
    config_path: str | None = None
    config_dirs: tuple[str, ...] = ()
    allow_targets: tuple[str, ...] = ()
    help: bool = False
    hydra_help: bool = False
    version: bool = False
    shell_completion: bool = False
    cfg: str | None = None
    resolve: bool = False
    package: str | None = None
    info: str | None = None

    @property
    def asks_for_text(self) -> bool:
        """Whether help, a configuration or the like is asked for instead of a run."""
        named = (self.cfg, self.info)
        flags = (self.help, self.version, self.hydra_help, self.shell_completion)
        return any(flags) or any(word is not None for word in named)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(Problem("command line", message, self._hint(message)))

    def _hint(self, message: str) -> str:
        word = re.match(r"unrecognized arguments: --?([\w.-]+)", message)
        key = word[1].replace("-", "_") if word and self.prog == PRIMARY else ""
        if ours := our_key(key):
            return f"it is called {ours} here, and keys are typed as key=value, without dashes"
        if "." in key or key in declared(Config):
            return f"write {key}=..., without dashes"
        return "see --help"


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command that takes overrides."""
    it = _Parser(prog="train", add_help=False, allow_abbrev=False)

    def flag(*names: str, help: str) -> None:
        it.add_argument(*names, action="store_true", help=help)

    def text(*names: str, help: str, **more: Any) -> None:
        it.add_argument(*names, help=help, **more)

    text("overrides", nargs="*", help="key=value, group=choice, +key=value, ~key")
    flag("--help", "-h", help="groups, experiments and options")
    flag("--version", help="versions of Regimen and Hydra")
    flag("--multirun", "-m", help="one job for each combination of values")
    flag("--run", "-r", help="one job; the default")
    text("--cfg", "-c", choices=("job", "hydra", "all"), help="print the config, run nothing")
    flag("--resolve", help="with --cfg: interpolations replaced")
    text("--package", "-p", help="with --cfg: only this part, such as optimizer")
    more = {"action": "append", "default": []}
    text("--config-dir", "-cd", **more, help="a further folder of configs, found first")
    text("--config-name", "-cn", help=f"the primary config (default: {PRIMARY})")
    text("--config-path", "-cp", help="the folder of configs instead of Regimen's")
    text("--allow-target", **more, help="a further package that _target_ may name")
    text("--info", "-i", nargs="?", const="all", choices=INFO, help="how it composes")
    flag("--hydra-help", help="Hydra's own help")
    flag("--shell-completion", "-sc", help="install=bash, uninstall=bash")
    return it


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that takes words, not overrides; its mistakes exit with 2."""
    return _Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_command(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace | None:
    """Take a command line apart; None where its help was asked for, and printed.

    Raises ConfigError.
    """
    if {"--help", "-h"} & set(argv):
        parser.print_help()
        return None
    return parser.parse_intermixed_args(list(argv))


def parse_or_help(argv: Sequence[str], text: str) -> Arguments | None:
    """Parse a command line; None where its help `text` was asked for, and printed."""
    arguments = parse_arguments(argv)
    if arguments.help:
        print(text, end="")
    return None if arguments.help else arguments


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse a command line. Raises ConfigError."""
    problems = [p for text in argv if (p := _oversized(text)) is not None]
    if problems:
        raise ConfigError(problems)
    got: dict[str, Any] = vars(parser().parse_intermixed_args(list(argv)))
    del got["run"]
    got |= {"config_dirs": got.pop("config_dir"), "allow_targets": got.pop("allow_target")}
    got["config_name"] = got["config_name"] or PRIMARY
    for name in ("overrides", "config_dirs", "allow_targets"):
        got[name] = tuple(got[name])
    return Arguments(**got)


def _oversized(text: str) -> Problem | None:
    if len(text) > MAX_OVERRIDE:
        return Problem(text[:40] + "...", f"longer than {MAX_OVERRIDE} characters")
    key = text.partition("=")[0]
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACKETS or key.count(".") > MAX_BRACKETS:
        return Problem(text[:40] + "...", f"nested deeper than {MAX_BRACKETS} levels")
    return None
