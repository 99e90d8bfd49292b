"""The folders that Hydra reads configurations from; each file is checked first."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

# Hydra's public initialize_config_dir() takes a single folder of the file system. A search path of
# several folders, read through ExaminedSource, is built by hand.
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

# The interface of a source is public (hydra.plugins.config_source); the implementation for files,
# which ExaminedSource extends, is not.
from hydra._internal.core_plugins.file_config_source import FileConfigSource

# What initialize_config_dir() creates, with its own search path.
from hydra._internal.hydra import Hydra

# Plugins.register() does not add to the registry of sources by scheme.
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.version import VersionBase, setbase
from omegaconf import OmegaConf

from conf.errors import ConfigError, Problem
from conf.interpolation import texts
from conf.yaml_file import Document, plain_values
from scripts.cli.arguments import Arguments
from scripts.composition.origins import Notes, shown_path
from scripts.composition.overrides import NO_HYDRA, choice_problem
from scripts.composition.trees import UNRESOLVED, first_lines, inside

CONF = Path(__file__).resolve().parents[2] / "conf"
_SCHEME = "examined"


class ExaminedSource(FileConfigSource):
    """A folder of YAML files, each checked before Hydra reads it; paths outside are refused."""

    notes: Notes

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the source in Hydra's search path."""
        return _SCHEME

    def is_group(self, config_path: str) -> bool:
        """Return whether a subfolder exists."""
        return inside(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Return whether a file exists in this folder."""
        return inside(config_path) and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; one that cannot be read is a problem, and empty."""
        path = self.file(config_path)
        document = self.notes.read(path)
        empty = ConfigResult(self.provider, self.path, OmegaConf.create(), {"package": None})
        if not document.readable:
            return empty
        try:
            result = super().load_config(config_path)
        except (*UNRESOLVED, yaml.YAMLError, OSError) as error:
            document.readable = False  # without its keys, nothing else makes sense
            self.notes.problems.append(_unread(error, document, path))
            return empty
        # Hydra requires `# @package` on the first line; ours may have the command there.
        result.header["package"] = package = document.package
        self._refuse_hydra(result, path)
        if config_path.split("/")[0] in ("experiment", "debug") and package != "_global_":
            self.note("", "must open with `# @package _global_`, or its keys go astray", path)
            document.readable = False
            return empty
        return result

    def file(self, config_path: str) -> Path:
        """Return the path of a config's file."""
        return Path(self.path, self._normalize_file_name(config_path))

    def note(self, key: str, message: str, path: Path) -> None:
        """Add a problem of a file."""
        self.notes.problems.append(Problem(key, message, file=shown_path(path)))

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
            problem = "is outside the folder of configs"
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


def _unread(error: Exception, document: Document, path: Path) -> Problem:
    """Return why OmegaConf refuses a file, with the key of a broken interpolation."""
    name = shown_path(path)
    if not isinstance(error, UNRESOLVED):  # YAML itself cannot be read
        return Problem("", first_lines(error), file=name)
    for key, text in texts(plain_values(path.read_text("utf-8-sig"), name), ""):
        try:
            OmegaConf.create({"text": text})
        except UNRESOLVED:
            message = f"{text!r} is not an interpolation that can be read"
            hint = r"close its brace, or write \${ for the text itself"
            return Problem(key, message, hint, f"{name}:{document.lines.get(key, 1)}")
    return Problem("", first_lines(error), file=name)


@contextmanager
def opened(arguments: Arguments) -> Iterator[Hydra]:
    """Set up Hydra over the user's folder and ours, in this order; tear it down at the end."""
    main = _resolved(arguments.config_path or CONF, "--config-path")
    folders = [(_resolved(d, "--config-dir"), "command-line") for d in arguments.config_dirs]
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder, provider in [*folders, (main, "main")]:
        option = "--config-dir" if provider == "command-line" else "--config-path"
        check_folder(folder, option)
        path.append(provider, f"{_SCHEME}://{folder}")
    path.append("schema", "structured://")
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().register(ExaminedSource)
    # Hydra keeps its instance and the version whose rules it follows in the process, where the
    # caller may have set others.
    instance, rules = GlobalHydra.instance(), VersionBase.instance()
    before = instance.hydra, rules.version_base
    instance.clear()
    setbase("1.3")
    try:
        yield Hydra.create_main_hydra2("train", path)
    finally:
        instance.hydra, rules.version_base = before


def _resolved(folder: str | Path, option: str) -> Path:
    try:
        return Path(folder).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, a cycle of links
        raise ConfigError(Problem(option, f"{folder}: {first_lines(error)}")) from error


def check_folder(folder: Path, option: str) -> None:
    """Raise ConfigError if a folder of configs does not exist or cannot be listed."""
    try:
        with os.scandir(folder):
            return
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(Problem(option, f"there is no folder {folder}")) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(Problem(option, f"cannot list {folder}: {reason}")) from error
