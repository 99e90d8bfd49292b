"""Compose a configuration with Hydra, without its job machinery: no callbacks, no working folder.

Overrides are applied openly, and the result is then held against the schema, so that all mistakes
of a command line are reported together. Nothing here imports torch.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
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
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from conf.check import check, nearest
from conf.defaults import fill_defaults
from conf.errors import ConfigError, Problem
from conf.interpolation import interpolation_problems
from scripts.arguments import Arguments, parse_arguments
from scripts.origins import Notes, Origins, Placed, shown_path
from scripts.trees import (
    escape_reserved,
    first_lines,
    inside,
    resolution_problems,
    unfinished,
)
from trainer.instantiate import allow, refused_targets

CONF = Path(__file__).resolve().parent.parent / "conf"
MAX_JOBS = 10_000  # of a sweep
_SCHEME = "examined"
_UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
_HYDRA = "Hydra's own keys cannot be set: Regimen does not run Hydra's jobs"
_INSTEAD = {"run.dir": "run_dir=DIR", "sweep.dir": "run_dir=DIR", "searchpath": "--config-dir DIR"}


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration that passed every check which needs no import of what it names."""

    config: dict[str, Any]  # plain and resolved, but for `${total_steps}` and `${steps_per_epoch}`
    overrides: list[str]
    choices: dict[str, Any]  # what was picked for each group
    origins: Origins
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Swept:
    """An override of one job of a sweep."""

    text: str  # as it stands on the job's command line
    key: str
    value: str
    varies: bool  # between the jobs


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
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
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
            self.note("hydra", _HYDRA, path)
            result.config = OmegaConf.create()
        defaults = OmegaConf.to_container(result.config).get("defaults")  # type: ignore[union-attr]
        for entry in defaults if isinstance(defaults, list) else []:
            if re.search(r"(^|[\s/@])hydra([/.@]|$)", str(next(iter(entry), entry))):
                self.note("defaults", f"{entry}: {_HYDRA}", path)
                result.config = OmegaConf.create()


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
        lists = [composition.values_of(override) for override in composition.parse(sweep=True)]
        composition.stop_if_wrong()
    if math.prod(len(values) for values in lists) > MAX_JOBS:
        raise ConfigError(f"these values make more than {MAX_JOBS} jobs")
    return [list(combination) for combination in itertools.product(*lists)]


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
        self.notes = Notes()
        self.problems: list[Problem] = []
        for source in self.loader.get_sources():
            if isinstance(source, ExaminedSource):
                source.notes = self.notes
        self.origins = Origins(self.notes)

    def checked(self) -> Composed:
        raw, choices = self.unresolved()
        raw = self.resolved(raw)
        self.check(raw)
        self.stop_if_wrong()
        overrides = list(self.arguments.overrides)
        return Composed(raw, overrides, choices, self.origins, self.arguments)

    def check(self, raw: dict[str, Any], incomplete: bool = False) -> None:
        """Hold a tree against the schema; what is unresolved is not judged."""
        open_keys = {p.key for p in self.problems} | set(unfinished(raw, incomplete))
        self.problems += [p for p in check(raw) if p.key not in open_keys]
        self.problems += [Problem(p.key, p.message) for p in refused_targets(raw)]

    def unresolved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the composed tree with its interpolations, and the groups' choices."""
        groups, values = self._sorted(self.parse())
        cfg, choices = self._load(groups)
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
        """Parse the overrides one by one, so that one mistake does not hide the next."""
        parser = OverridesParser.create(self.loader)
        parsed = []
        for text in self.arguments.overrides:
            try:
                override = parser.parse_overrides([text])[0]
            except Exception as error:
                self._complain(text, f"not an override: {first_lines(error)}")
                continue
            if self._allowed(override, text, sweep):
                parsed.append(override)
        return parsed

    def _allowed(self, override: Override, text: str, sweep: bool) -> bool:
        key = override.key_or_group
        if re.match(r"hydra([./@]|$)", key) or (override.package or "").startswith("hydra"):
            instead = _INSTEAD.get(key.removeprefix("hydra."))
            self._complain(key, _HYDRA, hint=f"use {instead}" if instead else None)
        elif override.is_sweep_override() and not sweep:
            hint = f"-m sweeps over them; {key}=[...] is a list; \"{key}='...'\" is text"
            self._complain(key, f"several values in {text!r}", hint=hint)
        else:
            return True
        return False

    def values_of(self, override: Override) -> list[Swept]:
        """Return one override for each value that a sweep gives a key."""
        key, text = override.get_key_element(), override.input_line or ""
        name = override.key_or_group
        if not override.is_sweep_override():
            return [Swept(text, name, text.partition("=")[2], False)]
        if not override.is_discrete_sweep():
            self._complain(name, "an interval has no end of values", "search it: -m sweep=optuna")
            return []
        try:
            values = [str(value) for value in override.sweep_string_iterator()]
        except Exception as error:
            self._complain(name, first_lines(error))
            return []
        return [Swept(f"{key}={value}", name, value, True) for value in values]

    def _sorted(self, overrides: list[Override]) -> tuple[list[str], list[Override]]:
        """Separate choices of groups, as text for Hydra, from values."""
        groups, values = [], []
        for override in overrides:
            value = override.value()
            if isinstance(value, dict) or not self._is_group(override.key_or_group):
                values.append(override)
            elif (text := self._choice(override, value)) is not None:
                groups.append(text)
        return groups, values

    def _is_group(self, key: str) -> bool:
        exists: bool = self.loader.repository.group_exists(key)
        return exists

    def _choice(self, override: Override, value: Any) -> str | None:
        """Return the override of a group as Hydra is to see it; None where it was refused."""
        group = override.key_or_group
        element = override.get_key_element().lstrip("+~")
        if override.is_delete() or value is None:
            return f"~{element}"
        options = self.loader.repository.get_group_options(group)
        for name in value if isinstance(value, list) else [value]:
            path = f"{group}/{name}"
            if not isinstance(name, str) or not self.loader.repository.config_exists(path):
                near = nearest(str(name), options)
                hint = f"did you mean {near}? " if near else ""
                self._complain(
                    group, f"there is no {group}={name}", f"{hint}choose of {', '.join(options)}"
                )
                return None
        appended = override.is_add() and element not in self._known_groups()
        assert override.input_line is not None
        return ("+" if appended else "") + override.input_line.lstrip("+")

    def _known_groups(self) -> set[str]:
        name = self.arguments.config_name
        return set(self.loader.compute_defaults_list(name, [], RunMode.RUN).overrides.known_choices)

    def _load(self, groups: list[str]) -> tuple[DictConfig, dict[str, Any]]:
        name = self.arguments.config_name
        try:
            cfg = self.loader.load_configuration(name, groups, RunMode.RUN)
            listed = self.loader.compute_defaults_list(name, groups, RunMode.RUN)
        except Exception as error:
            if self.notes.readable:
                near = nearest(name, self._primaries()) if "primary config" in str(error) else None
                hint = f"did you mean {near}?" if near else None
                self.problems.append(Problem("", first_lines(error), hint=hint))
            self.stop_if_wrong()
            raise
        choices = {k: v for k, v in cfg.hydra.runtime.choices.items() if not k.startswith("hydra/")}
        self.origins.files = [p for d in listed.defaults if (p := self._placed(d)) is not None]
        with open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.set_struct(cfg, False)
        return cfg, choices

    def _placed(self, default: ResultDefault) -> Placed | None:
        path = default.config_path or ""
        source = next((s for s in self.loader.get_sources() if s.is_config(path)), None)
        if isinstance(source, ExaminedSource):
            return Placed(source.file(path), default.package or "")
        return None

    def _primaries(self) -> list[str]:
        options: list[str] = self.loader.repository.get_group_options("")
        return options

    def _apply(self, override: Override, cfg: DictConfig) -> None:
        assert override.input_line is not None
        try:
            ConfigLoaderImpl._apply_overrides_to_config([_opened_up(override)], cfg)
        except Exception as error:
            self._complain(override.key_or_group, first_lines(error.__cause__ or error))
        self.origins.overrides[override.key_or_group] = override.input_line

    def resolved(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with its interpolations replaced, or as it was where one cannot be."""
        found = interpolation_problems(raw)
        self.problems += found
        if found:
            return raw
        cfg = OmegaConf.create(escape_reserved(raw))
        try:
            return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
        except _UNRESOLVED:
            self.problems += resolution_problems(cfg, _UNRESOLVED, "")
            return raw

    def _complain(self, key: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(key, message, "command line", hint))


def _opened_up(override: Override) -> Override:
    """Make an override add its key where there is none: the schema judges afterwards."""
    opened = copy(override)
    if not override.is_delete():
        opened.type = OverrideType.FORCE_ADD
    return opened


@contextmanager
def _opened(arguments: Arguments) -> Iterator[Hydra]:
    """Set Hydra up over our folder and the user's, which comes first; take it down again."""
    main = Path(arguments.config_path or CONF).resolve()
    folders = [(Path(d).resolve(), "command-line") for d in arguments.config_dirs]
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder, provider in [*folders, (main, "main")]:
        if not folder.is_dir():
            option = "--config-dir" if provider == "command-line" else "--config-path"
            raise ConfigError([Problem(option, f"there is no folder {folder}")])
        path.append(provider, f"{_SCHEME}://{folder}")
    path.append("schema", "structured://")
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().register(ExaminedSource)
    try:
        yield Hydra.create_main_hydra2("train", path)
    finally:
        GlobalHydra.instance().clear()
