"""Compose a configuration with Hydra, without its job machinery: no callbacks, no working folder.

Overrides are applied openly, and the result is then held against the schema, so that all mistakes
of a command line are reported together. Nothing here imports torch.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.check import check, fill_defaults, nearest
from conf.errors import ConfigError, Problem
from conf.interpolation import interpolation_problems
from scripts.cli.arguments import Arguments, parse_arguments
from scripts.composition.argument_names import argument_problems
from scripts.composition.origins import Notes, Origins, Placed, shown_path
from scripts.composition.overrides import NO_HYDRA, Dimension, Overrides, Swept, choice_problem
from scripts.composition.trees import (
    escape_reserved,
    first_lines,
    inside,
    resolution_problems,
    unfinished,
    without,
)
from trainer.targets.instantiate import allow, refused_targets
from trainer.targets.renamed import with_present_targets

CONF = Path(__file__).resolve().parents[2] / "conf"
MAX_JOBS = 10_000  # of a sweep
_SCHEME = "examined"
_UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
# What Hydra raises about input that it cannot use; its asserts among them.
_HYDRA_FAILS = (*_UNRESOLVED, HydraException, AssertionError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration that passed every check which needs no import of what it names."""

    config: dict[str, Any]  # plain and resolved, but for `${total_steps}` and `${steps_per_epoch}`
    overrides: list[str]
    choices: dict[str, Any]  # what was picked for each group
    origins: Origins
    arguments: Arguments


class ExaminedSource(FileConfigSource):
    """A folder of YAML files, each examined before Hydra reads it, and none outside of it."""

    notes: Notes

    @staticmethod
    def scheme() -> str:
        """Name the source in Hydra's search path."""
        return _SCHEME

    def is_group(self, config_path: str) -> bool:
        """Tell whether a folder exists, inside of this one."""
        return inside(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Tell whether a file exists, inside of this folder."""
        return inside(config_path) and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; one that cannot be read is empty, and noted."""
        path = self.file(config_path)
        document = self.notes.read(path)
        empty = ConfigResult(self.provider, self.path, OmegaConf.create(), {"package": None})
        if not document.readable:
            return empty
        try:
            result = super().load_config(config_path)
        except (*_UNRESOLVED, yaml.YAMLError, OSError) as error:
            self.note("", first_lines(error), path)
            return empty
        # Hydra wants `# @package` on the very first line; ours may tell the command first.
        result.header["package"] = package = document.package
        self._refuse_hydra(result, path)
        if config_path.split("/")[0] in ("experiment", "debug") and package != "_global_":
            self.note("", "must open with `# @package _global_`, or its keys go astray", path)
        return result

    def file(self, config_path: str) -> Path:
        """Return the file of a config."""
        return Path(self.path, self._normalize_file_name(config_path))

    def note(self, key: str, message: str, path: Path) -> None:
        """Note a problem of a file."""
        self.notes.problems.append(Problem(key, message, shown_path(path)))

    def _refuse_hydra(self, result: ConfigResult, path: Path) -> None:
        package = result.header.get("package") or ""
        if package == "hydra" or package.startswith("hydra.") or "hydra" in result.config:
            self.note("hydra", NO_HYDRA, path)
            result.config = OmegaConf.create()
        defaults = OmegaConf.to_container(result.config).get("defaults")  # type: ignore[union-attr]
        for entry in defaults if isinstance(defaults, list) else []:
            for group, value in entry.items() if isinstance(entry, dict) else ():
                self._refuse_choice(str(group), value, path)
            if re.search(r"(^|[\s/@])hydra([/.@]|$)", str(next(iter(entry), entry))):
                self.note("defaults", f"{entry}: {NO_HYDRA}", path)
                result.config = OmegaConf.create()

    def _refuse_choice(self, entry: str, value: Any, path: Path) -> None:
        words = entry.split()
        group = words[-1].partition("@")[0] if words else ""
        problem = choice_problem(group.lstrip("/"), value)
        if ".." in Path(f"{group}/{value}").parts:
            problem = "leads out of the folder of configs"
        elif words[0:1] == ["optional"] and isinstance(value, str):
            here = group.lstrip("/") if group.startswith("/") else self._beside(path, group)
            ours = CONF / here
            known = self.is_config(f"{here}/{value}") or (ours / f"{value}.yaml").exists()
            if not known and (self.is_group(here) or ours.is_dir()):
                problem = f"there is no {group}={value}"
        if problem:
            self.note("defaults", f"{entry}: {problem}", path)

    def _beside(self, path: Path, group: str) -> str:
        return str(path.parent.relative_to(self.path) / group)


def compose(argv: Sequence[str] | Arguments) -> Composed:
    """Compose and check the configuration of one job; raises ConfigError with all mistakes."""
    arguments = argv if isinstance(argv, Arguments) else parse_arguments(argv)
    allow(arguments.allow_targets)
    with _opened(arguments) as hydra:
        return _Composition(hydra, arguments).checked()


def split_jobs(arguments: Arguments) -> list[list[Swept]]:
    """Return the overrides of each job of a sweep, every combination once; raises ConfigError."""
    with _opened(arguments) as hydra:
        composition = _Composition(hydra, arguments)
        lists = [
            composition.overrides.values_of(override) for override in composition.parse(sweep=True)
        ]
        composition.stop_if_wrong()
    if math.prod(len(values) for values in lists) > MAX_JOBS:
        raise ConfigError(f"these values make more than {MAX_JOBS} jobs")
    return [list(combination) for combination in itertools.product(*lists)]


def split_search(arguments: Arguments) -> tuple[list[str], list[Dimension]]:
    """Separate the overrides that every job of a search has from those that it varies."""
    with _opened(arguments) as hydra:
        composition = _Composition(hydra, arguments)
        dimension = composition.overrides.dimension
        parsed = [
            (override.input_line, dimension(override)) for override in composition.parse(True)
        ]
        composition.stop_if_wrong()
    fixed = [str(text) for text, varied in parsed if varied is None]
    return fixed, [varied for _, varied in parsed if varied is not None]


def config_text(arguments: Arguments) -> tuple[str, list[Problem]]:
    """Return what `--cfg job` prints, and what is wrong with it; values may be missing still."""
    with _opened(arguments) as hydra:
        composition = _Composition(hydra, arguments)
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
    """Let Hydra print what it knows best: its help, its search path, its completions."""
    name, overrides = arguments.config_name, list(arguments.overrides)
    with _opened(arguments) as hydra:
        composition = _Composition(hydra, arguments)
        if arguments.shell_completion:
            try:
                hydra.shell_completion(name, overrides)
            except ValueError as error:
                raise ConfigError([Problem("--shell-completion", first_lines(error))]) from error
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


class _Composition:
    """One pass from overrides to a checked configuration, gathering mistakes on the way."""

    def __init__(self, hydra: Hydra, arguments: Arguments) -> None:
        self.hydra = hydra
        assert isinstance(hydra.config_loader, ConfigLoaderImpl)
        self.loader = hydra.config_loader
        self.arguments = arguments
        self.repository = CachingConfigRepository(self.loader.repository)
        self.notes = Notes()
        self.overrides = Overrides(self.repository)
        self.problems = self.overrides.problems
        for source in [*self.loader.get_sources(), *self.repository.get_sources()]:
            if isinstance(source, ExaminedSource):
                source.notes = self.notes
        self.origins = Origins(self.notes)

    def checked(self) -> Composed:
        raw, choices = self.unresolved()
        raw = with_present_targets(self.resolved(raw))
        self.check(raw)
        self.stop_if_wrong()
        overrides = list(self.arguments.overrides)
        return Composed(raw, overrides, choices, self.origins, self.arguments)

    def check(self, raw: dict[str, Any], incomplete: bool = False) -> None:
        """Hold a tree against the schema; what is unresolved is not judged."""
        open_keys = {p.key for p in self.problems} | set(unfinished(raw, incomplete))
        self.problems += [p for p in check(raw) if p.key not in open_keys]
        refused = refused_targets(raw)
        self.problems += [Problem(p.key, p.message) for p in refused]
        if self.found():  # else the signatures are held against their nodes in a moment
            away = {*open_keys, *(p.key.removesuffix("._target_") for p in refused)}
            found = argument_problems(raw)
            self.problems += [p for p in found if p.key.rpartition(".")[0] not in away]

    def unresolved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the composed tree with its interpolations, and the groups' choices."""
        picked, values = self.overrides.sort(self.parse(), self._known_groups)
        cfg, choices = self._load(picked)
        for override in values:
            self._apply(override, cfg)
        if not self.notes.readable:
            self.stop_if_wrong()
        container = OmegaConf.to_container(cfg, resolve=False)
        assert isinstance(container, dict)
        return fill_defaults({str(k): v for k, v in container.items()}), choices

    def found(self) -> list[Problem]:
        """Return every mistake so far, with the file of each."""
        return [*self.notes.problems, *self.origins.locate(self.problems)]

    def stop_if_wrong(self) -> None:
        """Raise what was found, if anything was."""
        if problems := self.found():
            raise ConfigError(problems)

    def parse(self, sweep: bool = False) -> list[Override]:
        """Parse the overrides of the command line."""
        parser = OverridesParser.create(self.loader)
        texts = self.arguments.overrides
        return self.overrides.parse(texts, lambda text: parser.parse_overrides([text])[0], sweep)

    def _known_groups(self) -> set[str]:
        return set(self._listed([]).overrides.known_choices)

    def _listed(self, choices: list[str]) -> DefaultsList:
        return create_defaults_list(
            repo=self.repository,
            config_name=self.arguments.config_name,
            overrides_list=OverridesParser.create().parse_overrides(choices),
            prepend_hydra=False,
            skip_missing=False,
        )

    def _load(self, choices: list[str]) -> tuple[DictConfig, dict[str, Any]]:
        """Merge the files that the choices name, without the tree of Hydra's own settings."""
        try:
            listed = self._listed(choices)
            cfg = self.loader._compose_config_from_defaults_list(listed.defaults, self.repository)
        except _HYDRA_FAILS as error:
            if self.notes.readable:
                self.problems.append(Problem("", first_lines(error), hint=self._meant(error)))
            self.stop_if_wrong()
            raise
        self.origins.files = [p for d in listed.defaults if (p := self._placed(d)) is not None]
        return cfg, dict(listed.overrides.known_choices)

    def _meant(self, error: Exception) -> str | None:
        if "primary config" not in str(error):
            return None
        near = nearest(self.arguments.config_name, self.repository.get_group_options(""))
        return f"did you mean {near}?" if near else None

    def _placed(self, default: ResultDefault) -> Placed | None:
        path = default.config_path or ""
        source = next((s for s in self.repository.get_sources() if s.is_config(path)), None)
        if isinstance(source, ExaminedSource):
            return Placed(source.file(path), default.package or "")
        return None

    def _apply(self, override: Override, cfg: DictConfig) -> None:
        assert override.input_line is not None
        try:
            ConfigLoaderImpl._apply_overrides_to_config([_opened_up(override)], cfg)
        except _HYDRA_FAILS as error:
            self.overrides.complain(override.key_or_group, first_lines(error.__cause__ or error))
        self.origins.overrides[override.key_or_group] = override.input_line

    def resolved(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with its interpolations replaced, or as it was where one cannot be."""
        found = interpolation_problems(raw)
        self.problems += found
        sound = without(raw, {problem.key for problem in found}) if found else raw
        if found and interpolation_problems(sound):
            return raw
        cfg = OmegaConf.create(escape_reserved(sound))
        try:
            return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
        except _UNRESOLVED:
            self.problems += resolution_problems(cfg, _UNRESOLVED, "")
            return sound


def _opened_up(override: Override) -> Override:
    """Make an override add its key where there is none: the schema judges afterwards."""
    opened = copy(override)
    if not override.is_delete():
        opened.type = OverrideType.FORCE_ADD
    return opened


@contextmanager
def _opened(arguments: Arguments) -> Iterator[Hydra]:
    """Set Hydra up over our folder and the user's, which comes first; take it down again."""
    main = _resolved(arguments.config_path or CONF, "--config-path")
    folders = [(_resolved(d, "--config-dir"), "command-line") for d in arguments.config_dirs]
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder, provider in [*folders, (main, "main")]:
        option = "--config-dir" if provider == "command-line" else "--config-path"
        _check_folder(folder, option)
        path.append(provider, f"{_SCHEME}://{folder}")
    path.append("schema", "structured://")
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().register(ExaminedSource)
    try:
        yield Hydra.create_main_hydra2("train", path)
    finally:
        GlobalHydra.instance().clear()


def _resolved(folder: str | Path, option: str) -> Path:
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a link in a circle
        raise ConfigError([Problem(option, f"{folder}: {first_lines(error)}")]) from error


def _check_folder(folder: Path, option: str) -> None:
    """Raise ConfigError where a folder of configs is none, or cannot be listed."""
    try:
        with os.scandir(folder):
            return
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError([Problem(option, f"there is no folder {folder}")]) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError([Problem(option, f"cannot list {folder}: {reason}")]) from error
