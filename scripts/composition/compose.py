"""Compose a configuration with Hydra, without its jobs, callbacks and working folders.

Overrides are applied without Hydra's struct check, and the result is checked against the schema, so
that all mistakes of a command line are reported together. Nothing here imports torch, but where a
`_target_` was replaced: what it takes of the earlier one's arguments, only it can tell.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from conf.errors import ConfigError, Problem, did_you_mean
from conf.interpolation import sections
from scripts.cli.arguments import Arguments, parse_arguments, parser
from scripts.composition.composition import Composition, escape_reserved
from scripts.composition.folders import REFUSED, opened
from scripts.composition.overrides import Dimension, Swept, first_lines
from trainer.targets.allow_list import allow, close

MAX_JOBS = 10_000  # of a sweep


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration that passed all checks that import no target."""

    config: dict[str, Any]  # resolved, except `${total_steps}` and `${steps_per_epoch}`
    overrides: list[str]
    choices: dict[str, Any]  # the choice for each group
    arguments: Arguments
    origin: Callable[[str], str | None]  # of a key: file:line, or the override; None: nowhere
    _located: Callable[[Problem], Problem]

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line to mistakes that are raised within."""
        try:
            yield
        except ConfigError as error:
            error.change(self._located)
            raise


def compose(argv: Sequence[str] | Arguments) -> Composed:
    """Compose and check the configuration of one job; raises ConfigError with all mistakes."""
    arguments = argv if isinstance(argv, Arguments) else parse_arguments(argv)
    allow(arguments.allow_targets)
    close([*arguments.config_dirs, *filter(None, [arguments.config_path])])
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        config = it.checked()
    overrides = list(arguments.overrides)
    return Composed(config, overrides, it.choices, arguments, it.tree.of, it.located)


def split_jobs(arguments: Arguments) -> list[list[Swept]]:
    """Return the overrides of each job of a sweep, each combination once. Raises ConfigError."""
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        lists = [it.overrides.values_of(override) for override in it.parse(sweep=True)]
        it.stop_if_wrong()
    if math.prod(len(values) for values in lists) > MAX_JOBS:
        raise ConfigError(f"these values make more than {MAX_JOBS} jobs")
    return [list(combination) for combination in itertools.product(*lists)]


def split_search(arguments: Arguments) -> tuple[list[str], list[Dimension]]:
    """Separate the overrides of all jobs of a search from the dimensions it searches."""
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        parsed = [(o.input_line, it.overrides.dimension(o)) for o in it.parse(sweep=True)]
        it.stop_if_wrong()
    fixed = [str(text) for text, varied in parsed if varied is None]
    return fixed, [varied for _, varied in parsed if varied is not None]


def config_text(arguments: Arguments) -> tuple[str, list[Problem]]:
    """Return what `--cfg job` prints, and the problems; values may still be missing."""
    with opened(arguments) as folders:
        it = Composition(folders, arguments)
        raw = it.unresolved()
        resolved = it.resolved(raw)
        it.check(resolved, incomplete=True)
        part: Any = OmegaConf.create(escape_reserved(resolved) if arguments.resolve else raw)
        wanted = arguments.package
        if wanted not in (None, "_global_"):
            part = OmegaConf.select(part, wanted)
            if part is None and wanted not in (known := dict(sections(resolved))):
                hint = did_you_mean(wanted, known)
                it.problems.append(Problem("--package", f"there is no {wanted}", hint))
                it.stop_if_wrong()
        text = OmegaConf.to_yaml(part) if isinstance(part, DictConfig | ListConfig) else f"{part}\n"
        return text, it.found()


def answer_by_hydra(arguments: Arguments) -> None:
    """Let Hydra print its own help, search path or completions."""
    name, overrides = arguments.config_name, list(arguments.overrides)
    with opened(arguments, whole=True) as folders:
        it, hydra = Composition(folders, arguments), folders.hydra
        try:
            if arguments.shell_completion:
                hydra.shell_completion(name, overrides)
                return
            it.parse(sweep=True)
            it.stop_if_wrong()
            if arguments.cfg:
                hydra.show_cfg(name, overrides, arguments.cfg, arguments.package, arguments.resolve)
            elif arguments.info:
                hydra.show_info(arguments.info, name, overrides)
            else:
                hydra.hydra_help(name, parser(), argparse.Namespace(overrides=overrides))
        except REFUSED as error:
            it.problems.append(Problem("", first_lines(error)))
        it.stop_if_wrong()


class _Module(ModuleType):
    """This module, which can be called as its function: `from scripts.composition import compose`.

    The package has the module under the name that the function has.
    """

    def __call__(self, argv: Sequence[str] | Arguments) -> Composed:
        return compose(argv)


sys.modules[__name__].__class__ = _Module
