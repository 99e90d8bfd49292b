"""The command line: the options of Hydra and ours, and the request for a run."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from regimen.conf.errors import ConfigError, Problem, nearest, raise_problems
from regimen.conf.fields import declared
from regimen.conf.json_text import nesting
from regimen.conf.other_words import our_key
from regimen.conf.schema import Config, Values
from regimen.conf.yaml_file import dump

PRIMARY = "train"
RUNS = Path("runs")  # the folder of runs without a `run_dir`
MAX_OVERRIDE = 8_000  # characters; Hydra's parser takes a second for a list of this length
MAX_BRACKETS = 20  # open at once


def option(*names: str, default: Any = None, **keywords: Any) -> Any:
    """Declare a field by the words that are typed for it, and more keywords for argparse."""
    return field(default=default, metadata={"names": names, **keywords})


def flag(*names: str, help: str) -> Any:
    """Declare a field that an option without a value sets."""
    return option(*names, default=False, action="store_true", help=help)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Train PyTorch models from YAML.

      train experiment=NAME [group=choice ...] [key=value ...]    train
      train -m experiment=NAME optimizer.lr=0.1,0.01              a job for each value, then a table
      train experiment=NAME dry_run=true                          the plan: checked, nothing trained
      train --cfg job experiment=NAME [--resolve] [-p KEY]        the composed configuration
      train --config-dir DIR experiment=MINE                      with configs of your own
      train --help optimizer                                      a group: choices, keys, meanings

    Overrides:
      key=value   sets a key (optimizer.lr=0.1); text with , = or spaces in quotes: name="'a, b'"
      group=x     picks conf/group/x.yaml; 'callbacks=[default,ema]' picks several
      +key=value  adds an argument to a node; ~key removes one; +group=x adds a group
      key=a,b     with -m: a job for each; also range(1,4), choice(a,b), glob(*)
    """

    overrides: tuple[str, ...] = option(
        default=(), nargs="*", help="key=value, group=choice, +key=value, ~key"
    )
    help: bool = flag("--help", "-h", help="groups, experiments and options")
    version: bool = flag("--version", help="versions of Regimen and Hydra")
    multirun: bool = flag("--multirun", "-m", help="one job for each combination of values")
    run: bool = flag("--run", "-r", help="one job; the default")
    cfg: str | None = option(
        "--cfg", "-c", choices=("job", "hydra", "all"), help="print the config, run nothing"
    )
    resolve: bool = flag("--resolve", help="with --cfg: interpolations replaced")
    package: str | None = option("--package", "-p", help="with --cfg: only this part: optimizer")
    config_dirs: tuple[str, ...] = option(
        "--config-dir",
        "-cd",
        default=(),
        action="append",
        help="a further folder, found first",
    )
    config_name: str = option(
        "--config-name", "-cn", default=PRIMARY, help=f"the primary config (default: {PRIMARY})"
    )
    config_path: str | None = option(
        "--config-path", "-cp", help="the folder of configs instead of Regimen's"
    )
    allow_targets: tuple[str, ...] = option(
        "--allow-target",
        default=(),
        action="append",
        help="a package that _target_ may name",
    )
    allow_remote_code: bool = flag(
        "--allow-remote-code", help="run Python code that a model or tokenizer of transformers has"
    )
    shell_completion: bool = flag("--shell-completion", "-sc", help="install=bash, zsh or fish")

    @property
    def asks_for_text(self) -> bool:
        """Whether help, a configuration or the like is requested instead of a run."""
        return bool(self.help or self.version or self.shell_completion or self.cfg)


class AnsweredError(SystemExit):
    """Help was requested, and is printed: the command ends well."""

    exit_code = 0


class _Parser(argparse.ArgumentParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise AnsweredError

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", message, self._hint(message))

    def _hint(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: --?([\w.-]+)", message)
        if unknown is None or self.prog != PRIMARY:
            return "see --help"
        key = unknown[1].replace("-", "_")
        ours = our_key(key)
        if ours:
            return f"it is called {ours} here, and keys are typed as key=value, without dashes"
        options = [name for one in fields(Arguments) for name in one.metadata["names"]]
        match = nearest(f"--{unknown[1]}", options, cutoff=0.8)
        if match:
            return f"did you mean {match}?"
        if "." in key or key in declared(Config) or "=" in message:
            return f"write {key}=..., without dashes"
        return "see --help"


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command that takes overrides."""
    result = _Parser(
        prog=PRIMARY,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # then a field has its default
    )
    for argument in fields(Arguments):
        keywords = dict(argument.metadata)
        result.add_argument(*keywords.pop("names"), dest=argument.name, **keywords)
    return result


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that takes words, not overrides; mistakes are ConfigErrors."""
    return _Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse a command line. Raises ConfigError."""
    raise_problems(problem for text in argv for problem in _size_problems(text))
    values: dict[str, Any] = vars(parser().parse_intermixed_args(list(argv)))
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return Arguments(**values)


def _size_problems(text: str) -> Iterator[Problem]:
    """Yield a problem if Hydra's parser would take very long for an override."""
    if len(text) > MAX_OVERRIDE:
        yield Problem(text[:40] + "...", f"longer than {MAX_OVERRIDE} characters")
        return
    if max(text.partition("=")[0].count("."), nesting(text)) > MAX_BRACKETS:
        yield Problem(text[:40] + "...", f"nested deeper than {MAX_BRACKETS} levels")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A checked configuration to run, and the arguments that it was composed from."""

    config: Values  # resolved, plain containers
    overrides: list[str]
    choices: Values  # the choice of each config group
    arguments: list[str]  # as typed, for `resume_command`
    allowed: list[str] = field(default_factory=list)  # packages of --allow-target
    allows_remote_code: bool = False  # --allow-remote-code
    prediction: Values | None = None  # the keys of `predict`
    evaluation: Values | None = None  # those of `evaluate`; without both: train
    files: list[str] = field(default_factory=list)  # lines that `predict` read from standard input

    def resume_command(self, run_dir: Path) -> str:
        """Return the command that resumes this run."""
        replaced = ("run_dir=", "resume=")
        kept = [text for text in self.arguments if not text.lstrip("+").startswith(replaced)]
        return shlex.join(["train", *kept, run_dir_override(run_dir), "resume=auto"])

    def config_text(self) -> str:
        """Return the configuration as YAML; keys that belong to a single start are null.

        The settings of a sweep are not part of it either.
        """
        return dump(self.config | dict.fromkeys(("run_dir", "resume", "dry_run", "sweep")))


def key_of(text: str) -> str:
    """Return the key of an override, without signs."""
    return text.lstrip("+~").partition("=")[0]


def run_dir_override(path: Path) -> str:
    """Return the override that names a folder, quoted where it must be."""
    text = str(path)
    needs_no_quotes = re.fullmatch(r"[\w./+-]+", text)
    return f"run_dir={text if needs_no_quotes else quoted(text)}"


def quoted(text: str) -> str:
    """Quote text for the value of an override: backslashes before a quote are doubled."""
    inner = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{inner}'"
