"""Compose a configuration with Hydra, without its jobs, callbacks and working folders.

Overrides are applied without Hydra's struct check, and the result is checked against the schema, so
that all mistakes of a command line are reported together. Nothing here imports torch.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# hydra_help() needs the parser of Hydra's own command line, which has no public name.
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import Arguments, parse_arguments
from scripts.composition.composition import Composition
from scripts.composition.origins import Origins
from scripts.composition.overrides import Dimension, Swept
from scripts.composition.sources import opened
from scripts.composition.trees import escape_reserved, first_lines
from trainer.targets.instantiate import allow

MAX_JOBS = 10_000  # of a sweep
_ahead: list["Composed"] = []  # at most one


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration that passed all checks that import no target."""

    config: dict[str, Any]  # resolved, except `${total_steps}` and `${steps_per_epoch}`
    overrides: list[str]
    choices: dict[str, Any]  # the choice for each group
    origins: Origins
    arguments: Arguments

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line to mistakes that are raised within."""
        try:
            yield
        except ConfigError as error:
            error.change(self.origins.located)
            raise


def compose(argv: Sequence[str] | Arguments) -> Composed:
    """Compose and check the configuration of one job; raises ConfigError with all mistakes."""
    arguments = argv if isinstance(argv, Arguments) else parse_arguments(argv)
    allow(arguments.allow_targets)
    if _ahead and _ahead[0].arguments == arguments:
        return _ahead.pop()
    with opened(arguments) as hydra:
        it = Composition(hydra, arguments)
        config = it.checked()
    return Composed(config, list(arguments.overrides), it.choices, it.origins, arguments)


def compose_ahead(argv: Sequence[str]) -> None:
    """Compose here what a process that is forked from this one will ask for: it need not again.

    Raises ConfigError, as that process will.
    """
    _ahead.clear()
    _ahead.append(compose(argv))


def split_jobs(arguments: Arguments) -> list[list[Swept]]:
    """Return the overrides of each job of a sweep, each combination once. Raises ConfigError."""
    with opened(arguments) as hydra:
        composition = Composition(hydra, arguments)
        lists = [
            composition.overrides.values_of(override) for override in composition.parse(sweep=True)
        ]
        composition.stop_if_wrong()
    if math.prod(len(values) for values in lists) > MAX_JOBS:
        raise ConfigError(f"these values make more than {MAX_JOBS} jobs")
    return [list(combination) for combination in itertools.product(*lists)]


def split_search(arguments: Arguments) -> tuple[list[str], list[Dimension]]:
    """Separate the overrides of all jobs of a search from the dimensions it searches."""
    with opened(arguments) as hydra:
        composition = Composition(hydra, arguments)
        dimension = composition.overrides.dimension
        parsed = [
            (override.input_line, dimension(override)) for override in composition.parse(True)
        ]
        composition.stop_if_wrong()
    fixed = [str(text) for text, varied in parsed if varied is None]
    return fixed, [varied for _, varied in parsed if varied is not None]


def config_text(arguments: Arguments) -> tuple[str, list[Problem]]:
    """Return what `--cfg job` prints, and the problems; values may still be missing."""
    with opened(arguments) as hydra:
        composition = Composition(hydra, arguments)
        raw, _ = composition.unresolved()
        resolved = composition.resolved(raw)
        composition.check(resolved, incomplete=True)
        part: Any = OmegaConf.create(escape_reserved(resolved) if arguments.resolve else raw)
        if arguments.package not in (None, "_global_"):
            part = OmegaConf.select(part, arguments.package)
        if not isinstance(part, DictConfig | ListConfig):
            return f"{part}\n", composition.found()
        return OmegaConf.to_yaml(part), composition.found()


def answer_by_hydra(arguments: Arguments) -> None:
    """Let Hydra print its own help, search path or completions."""
    name, overrides = arguments.config_name, list(arguments.overrides)
    with opened(arguments) as hydra:
        composition = Composition(hydra, arguments)
        if arguments.shell_completion:
            try:
                hydra.shell_completion(name, overrides)
            except ValueError as error:
                raise ConfigError(Problem("--shell-completion", first_lines(error))) from error
            return
        composition.parse(sweep=True)
        composition.stop_if_wrong()
        try:
            if arguments.cfg:
                hydra.show_cfg(name, overrides, arguments.cfg, arguments.package, arguments.resolve)
            elif arguments.info:
                hydra.show_info(arguments.info, name, overrides)
            else:
                hydra.hydra_help(name, get_args_parser(), get_args_parser().parse_args(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            composition.problems.append(Problem("", first_lines(error)))
        composition.stop_if_wrong()


class _Module(ModuleType):
    """This module, which can be called as its function: `from scripts.composition import compose`.

    The package has the module under the name that the function has.
    """

    def __call__(self, argv: Sequence[str] | Arguments) -> Composed:
        return compose(argv)


sys.modules[__name__].__class__ = _Module
