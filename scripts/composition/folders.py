"""The door to Hydra: the folders that it reads configurations from; each file is checked first."""

import builtins
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from regimen.conf.errors import ConfigError, Problem, did_you_mean
from regimen.conf.layout import ROOT
from regimen.conf.yaml_file import Document, examine
from regimen.scripts.cli.arguments import Arguments
from regimen.scripts.composition.overrides import NO_HYDRA, choice_problem, first_lines
from regimen.scripts.composition.tree import shown_path

CONF = ROOT / "conf"
# The rules by which Hydra 1.3 composes. Hydra 1.4 always follows them and takes no such parameter.
_RULES = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# The errors of Hydra and OmegaConf for invalid input, those of their asserts among them.
REFUSED = (
    OmegaConfBaseException,
    HydraException,
    RecursionError,
    ValueError,
    TypeError,
    AssertionError,
    KeyError,
    IndexError,
)


@functools.lru_cache(maxsize=1000)
def _examined(path: Path, version: tuple[int, int]) -> Document:
    return examine(path, shown_path(path))


class Folder(ConfigSource):
    """A folder of YAML files, each checked before Hydra reads it; paths outside are refused.

    Hydra is given the files' defaults lists only: `Tree` merges the rest of their content.
    """

    def __init__(self, folder: Path, provider: str, all_folders: "Folders") -> None:
        self.path = str(folder)
        self.provider = provider
        self.all_folders = all_folders

    def __deepcopy__(self, memo: object) -> "Folder":
        """Return this object: Hydra copies its sources before it reads them."""
        return self

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the source in Hydra's search path."""
        return "file"

    def available(self) -> bool:
        """Return whether the folder exists: it was checked before."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether a subfolder exists."""
        return _is_inside(config_path) and os.path.isdir(os.path.join(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        """Return whether a file exists in this folder."""
        return _is_inside(config_path) and os.path.isfile(self.file(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        """Return the names of the configs of a group, of the groups in it, or of both."""
        groups = []
        configs = []
        for entry in sorted(Path(self.path, config_path).iterdir()):
            if entry.is_dir() and entry.name != "__pycache__":
                groups.append(entry.name)
            elif entry.suffix == ".yaml" and entry.is_file():
                configs.append(entry.stem)
        if results_filter is ObjectType.GROUP:
            return groups
        if results_filter is ObjectType.CONFIG:
            return configs
        return groups + configs

    def file(self, config_path: str) -> Path:
        """Return the path of a config's file."""
        return Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; one that cannot be read is a problem, and empty."""
        document = self.read(config_path)
        content = document.values
        if not self.all_folders.whole:
            content = {key: value for key, value in content.items() if key == "defaults"}
        entries = content.get("defaults")
        if isinstance(entries, builtins.list):
            content = {**content, "defaults": _without_replaced_choices(entries)}
        config = OmegaConf.create(content)
        # Hydra requires `# @package` on the first line; ours may have the command there.
        return ConfigResult(self.provider, self.path, config, {"package": document.package})

    def read(self, config_path: str) -> Document:
        """Return the content of a file, and its mistakes; read it once."""
        path = self.file(config_path)
        documents = self.all_folders.documents
        if path not in documents:
            stat = path.stat()
            document = _examined(path, (stat.st_mtime_ns, stat.st_size))
            if document.readable:
                wrong = builtins.list(self._content_problems(document, config_path))
                if wrong:
                    problems = [*document.problems, *wrong]
                    document = Document({}, document.lines, problems, document.package, False)
            documents[path] = document
        return documents[path]

    def _content_problems(self, document: Document, config_path: str) -> Iterator[Problem]:
        """Yield what a file of a configuration may not hold."""
        package = document.package or ""
        shown = shown_path(self.file(config_path))
        if package.split(".")[0] == "hydra" or "hydra" in document.values:
            yield Problem("hydra", NO_HYDRA, file=shown)
        elif package != "_global_" and re.match("(experiment|debug)/", config_path):
            message = "must open with `# @package _global_`, or its keys go astray"
            yield Problem("", message, file=shown)
        entries = document.values.get("defaults")
        if not isinstance(entries, builtins.list):
            return
        group = config_path.rpartition("/")[0]
        for number, entry in enumerate(entries):
            pairs = entry.items() if isinstance(entry, dict) else [("", entry)]
            for text, value in pairs:
                key = f"defaults.{number}.{text}" if text else f"defaults.{number}"
                line = document.lines.get(key)
                place = f"{shown}:{line}" if line else shown
                for message, hint in self._entry_problems(str(text), value, group):
                    yield Problem("defaults", message, hint, place)

    def _entry_problems(
        self, text: str, value: Any, own_group: str
    ) -> Iterator[tuple[str, str | None]]:
        """Yield what is wrong with an entry of a defaults list, and the way out.

        `text`: what stands before the colon; without a colon it is empty, and the value names a
        file. `own_group`: the group of the file that has the list.
        """
        *words, name = (text or str(value)).partition("@")[0].split() or [""]
        group = name.lstrip("/")
        relative_group = os.path.join(own_group, name).lstrip("/")
        folders = self.all_folders
        override = f"write `override /{group}: {value}`"
        problem = choice_problem(group, value) if text else None
        if re.search(r"(^|[\s/@])hydra([\s/.@]|$)", text or str(value)):
            yield f"{text or value}: {NO_HYDRA}", None
        elif ".." in Path(f"{name}/{value}").parts:
            yield f"{name}: is outside the folder of configs", None
        elif problem:
            yield f"{group}: {problem}", None
        elif "override" in words and not folders.is_group(relative_group):
            hint: str | None = override
            if not folders.is_group(group):
                hint = did_you_mean(relative_group, folders.chosen)
            yield f"`{text}`: there is no group {relative_group}", hint
        elif text.startswith("/") and "@" not in text and group in folders.chosen:
            yield f"{group} has a choice already", override
        elif name != "_self_":
            choices = value if isinstance(value, builtins.list) else [value]
            for choice in choices:
                file = f"{relative_group}/{choice}" if text else relative_group
                if not isinstance(choice, str) or "${" in file:
                    continue
                if folders.find(file) is not None:
                    continue
                is_group = folders.is_group(relative_group)
                if "optional" in words and not is_group:
                    continue
                hint = did_you_mean(choice, folders.options(relative_group))
                if text and not is_group and folders.is_group(group):
                    hint = override
                yield f"there is no {file}.yaml", hint


def _without_replaced_choices(entries: list[Any]) -> list[Any]:
    """Return a defaults list without overrides that a later one replaces: Hydra takes the first."""
    kept = list[Any]()
    overridden = set[str]()
    for entry in reversed(entries):
        words = str(next(iter(entry), "")).split() if isinstance(entry, dict) else []
        if "override" in words:
            if words[-1] in overridden:
                continue
            overridden.add(words[-1])
        kept.append(entry)
    kept.reverse()
    return kept


def _is_inside(config_path: str) -> bool:
    return not os.path.isabs(config_path) and ".." not in Path(config_path).parts


@dataclass(slots=True)
class Folders:
    """The folders of a composition, the first one wins; Hydra is set up over them."""

    hydra: Any
    whole: bool  # whether Hydra is given all content of the files, since it prints it itself
    folders: list[Folder] = field(default_factory=list)
    documents: dict[Path, Document] = field(default_factory=dict)  # that were read so far

    def find(self, config_path: str) -> Folder | None:
        """Return the folder that a config is taken from."""
        return next((folder for folder in self.folders if folder.is_config(config_path)), None)

    def is_group(self, group: str) -> bool:
        """Return whether any folder has a group."""
        return any(folder.is_group(group) for folder in self.folders)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        names = set[str]()
        for folder in self.folders:
            if folder.is_group(group):
                names.update(folder.list(group, ObjectType.CONFIG))
        return sorted(names)

    @property
    def chosen(self) -> list[str]:
        """The groups that the primary config, which is read first, chooses in."""
        primary = next(iter(self.documents.values()), Document())
        groups = []
        for key in primary.lines:
            match = re.match(r"defaults\.\d+\./?([^@\s]+)", key)
            if match:
                groups.append(match[1])
        return groups

    @property
    def readable(self) -> bool:
        """Whether all files that were read so far have values."""
        return all(document.readable for document in self.documents.values())

    def explain(self, error: Exception, config_name: str) -> Problem:
        """Return the mistake that an error of Hydra's composition stands for."""
        if isinstance(error, RecursionError):
            lists = [shown_path(p) for p, one in self.documents.items() if "defaults" in one.lines]
            message = "a list leads back to its own file"
            return Problem("defaults", message, file=", ".join(lists[1:]))
        refused = re.match(r"Could not override '([^'@]+)'\. No match", str(error))
        if refused:
            group = refused[1]
            value = str(error).rpartition("=")[2]
            hint = None
            if not self.chosen:
                message = f"{config_name}.yaml holds values, and chooses in no group"
                hint = f"set keys of it: {group.replace('/', '.')}.KEY=VALUE"
            elif value == "[]":
                message = "has no choice that could be left out"
            else:
                message = "has no choice that could be replaced"
                hint = f"add one: +{group}={value}"
            return Problem(group, message, hint, "command line")
        hint = None
        if getattr(error, "missing_cfg_file", None) == config_name:
            way_out = f"experiment={config_name} names an experiment, --config-dir DIR a folder"
            hint = did_you_mean(config_name, self.options("")) or way_out
        return Problem("", first_lines(error), hint)


@contextmanager
def opened(arguments: Arguments) -> Iterator[Folders]:
    """Set up Hydra over the user's folders and ours, in this order; tear it down at the end."""
    places = [
        (check_folder(path, "--config-dir"), "command-line") for path in arguments.config_dirs
    ]
    main = check_folder(arguments.config_path or CONF, "--config-path")
    places.append((main, "main"))
    # Hydra keeps its instance and the version whose rules it follows in the process: restore those
    # of a caller that uses Hydra itself.
    rules = VersionBase.instance()
    version_before = rules.version_base
    hydra_before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), "train", **_RULES):
            composer = GlobalHydra.instance().hydra
            assert composer is not None
            folders = Folders(composer, whole=arguments.cfg in ("hydra", "all"))
            folders.folders += [Folder(path, provider, folders) for path, provider in places]
            sources = composer.config_loader.get_sources()
            sources[:] = [sources[0], *folders.folders, sources[-1]]  # between Hydra's own two
            yield folders
    finally:
        GlobalHydra.instance().hydra = hydra_before
        rules.version_base = version_before


def check_folder(folder: str | Path, option: str) -> Path:
    """Return the path of a folder of configs. Raises ConfigError if it cannot be listed."""
    try:
        path = Path(folder).resolve()
        with os.scandir(path):
            return path
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, a cycle of links
        reason = f"cannot list {folder}: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = f"there is no folder {folder}"
    raise ConfigError(option, reason)
