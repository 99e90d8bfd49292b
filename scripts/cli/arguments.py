"""The command line: the options of Hydra and ours, the keys of a command, the request of a run."""

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from conf.errors import ConfigError, Problem, did_you_mean, nearest
from conf.fields import declared
from conf.other_words import our_key
from conf.schema import Config
from conf.yaml_file import dump

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
        flags = self.help, self.version, self.hydra_help, self.shell_completion
        return any(flags) or bool(self.cfg or self.info)


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

    text = it.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    text("overrides", nargs="*", help="key=value, group=choice, +key=value, ~key")
    flag("--help", "-h", help="groups, experiments and options")
    flag("--version", help="versions of Regimen and Hydra")
    flag("--multirun", "-m", help="one job for each combination of values")
    flag("--run", "-r", help="one job; the default")
    text("--cfg", "-c", choices=("job", "hydra", "all"), help="print the config, run nothing")
    flag("--resolve", help="with --cfg: interpolations replaced")
    text("--package", "-p", help="with --cfg: only this part, such as optimizer")
    text("--config-dir", "-cd", **several, help="a further folder of configs, found first")
    text("--config-name", "-cn", help=f"the primary config (default: {PRIMARY})")
    text("--config-path", "-cp", help="the folder of configs instead of Regimen's")
    text("--allow-target", **several, help="a further package that _target_ may name")
    text("--info", "-i", nargs="?", const="all", choices=INFO, help="how it composes")
    flag("--hydra-help", help="Hydra's own help")
    flag("--shell-completion", "-sc", help="install=bash, uninstall=bash")
    return it


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that takes words, not overrides; its mistakes exit with 2."""
    form = argparse.RawDescriptionHelpFormatter
    return _Parser(prog=prog, description=description, formatter_class=form, allow_abbrev=False)


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
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    if max(deepest, text.partition("=")[0].count(".")) > MAX_BRACKETS:
        return Problem(text[:40] + "...", f"nested deeper than {MAX_BRACKETS} levels")
    return None


def of_run(arguments: Arguments, run_dir: str, overrides: Sequence[str]) -> Arguments:
    """Return the command line that composes a run's own configuration, with overrides."""
    return Arguments(
        overrides=tuple(overrides),
        config_name="config",
        config_dirs=(run_dir,),
        allow_targets=arguments.allow_targets,
    )


Take = Callable[[str], Any]  # from the text to the value; ValueError says what the text is not


def matching(pattern: str, words: str) -> Take:
    """Take text that matches a whole pattern, which `words` describe."""

    def take(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(words)
        return text

    return take


def one_of(*words: str) -> Take:
    """Take one of some words."""
    return matching("|".join(words), f"one of {', '.join(words)}")


def true_or_false(text: str) -> bool:
    """Take a flag."""
    return bool(one_of("true", "false")(text) == "true")


def whole(low: int = 1, high: int | None = None) -> Take:
    """Take an integer of at most six digits."""
    span = f"a number from {low} on" if high is None else f"a number from {low} to {high}"

    def take(text: str) -> int:
        number = int(matching(r"\d{1,6}", span)(text))
        if not low <= number <= (high or 999_999):
            raise ValueError(span)
        return number

    return take


def or_null(take: Take) -> Take:
    """Take what `take` does, and `null` as None."""
    return lambda text: None if text == "null" else take(text)


def take_keys(
    overrides: Sequence[str],
    keys: Mapping[str, Take],
    required: Mapping[str, str],
    command: str | None = None,
) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Return the values of a command's own keys, the other overrides, and all problems.

    required: the keys that may not be missing, each with what it wants. `run` must hold a run.
    command: its name, of one that takes no other keys.
    """
    own: dict[str, str] = {}
    values: dict[str, Any] = {}
    others, problems, roots = [], [], declared(Config)
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals and key in keys:
            own[key] = text
            continue
        others.append(override)
        near = nearest(key, [*keys, *roots])
        if command is not None:
            hint = did_you_mean(key, keys) or f"known are {', '.join(keys)}"
            problems.append(Problem(key, f"is no key of {command}", hint))
        elif key not in roots and near in keys:
            problems.append(Problem(key, "unknown key", f"did you mean {near}?"))
    for key, text in own.items():
        try:
            values[key] = keys[key](text)
        except ValueError as error:
            problems.append(Problem(key, f"is {text!r}, not {error}"))
    problems += [Problem(k, f"missing: {what}") for k, what in required.items() if not own.get(k)]
    if (run := own.get("run")) and not (Path(run) / "config.yaml").is_file():
        problems.append(Problem("run", f"{run} holds no run: it has no config.yaml"))
    return values, others, problems


@dataclass(frozen=True, slots=True)
class Request:
    """A checked configuration, and the arguments that it was composed from."""

    config: dict[str, Any]  # resolved, plain containers
    overrides: list[str]
    choices: dict[str, str]  # the choice of each config group
    arguments: list[str]  # as typed, for `resume_command`
    allowed: list[str] = field(default_factory=list)  # packages of --allow-target
    prediction: dict[str, Any] | None = None  # the keys of `predict`; None: train
    files: list[str] = field(default_factory=list)  # read by `predict` from standard input

    def resume_command(self, run_dir: Path) -> str:
        """Return the command that resumes this run."""
        kept = [a for a in self.arguments if not a.lstrip("+").startswith(("run_dir=", "resume="))]
        return shlex.join(["train", *kept, run_dir_override(run_dir), "resume=auto"])

    def config_text(self) -> str:
        """Return the configuration as YAML; keys that belong to a single start are null.

        What a sweep does with the run is not part of it.
        """
        return dump(self.config | dict.fromkeys(("run_dir", "resume", "dry_run", "sweep")))


def run_dir_override(path: Path) -> str:
    """Return the override that names a folder, quoted where it must be."""
    text = str(path)
    plain = re.fullmatch(r"[\w./+-]+", text)
    return f"run_dir={text if plain else quoted(text)}"


def quoted(text: str) -> str:
    """Quote text for the value of an override: backslashes before a quote are doubled."""
    inner = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{inner}'"
