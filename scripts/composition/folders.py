"""The door to Hydra: the folders that it reads configurations from; each file is checked first."""

import builtins
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import ConfigError, Problem, did_you_mean
from conf.yaml_file import Document, examine
from scripts.cli.arguments import Arguments
from scripts.composition.overrides import NO_HYDRA, choice_problem, first_lines
from scripts.composition.tree import shown_path

CONF = Path(__file__).resolve().parents[2] / "conf"
# What Hydra and OmegaConf raise for invalid input, their asserts among it.
REFUSED = (
    *(OmegaConfBaseException, HydraException, RecursionError, ValueError, TypeError),
    *(AssertionError, KeyError, IndexError),
)


@functools.lru_cache(maxsize=1000)
def _examined(path: Path, version: tuple[int, int]) -> Document:
    return examine(path, shown_path(path))


class Folder(ConfigSource):
    """A folder of YAML files, each checked before Hydra reads it; paths outside are refused.

    Hydra is given their defaults lists only, but for what it prints itself (`whole`): `Tree` merges
    what they hold.
    """

    def __init__(
        self, folder: Path, provider: str, documents: dict[Path, Document], whole: bool
    ) -> None:
        self.path, self.provider, self.whole = str(folder), provider, whole
        self.documents = documents  # the files that were read, of all folders

    def __deepcopy__(self, memo: object) -> "Folder":
        """Return this one: Hydra copies its sources before it reads them."""
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
        entries = sorted(Path(self.path, config_path).iterdir())
        groups = [p.name for p in entries if p.is_dir() and p.name != "__pycache__"]
        configs = [p.stem for p in entries if p.suffix == ".yaml" and p.is_file()]
        only = {ObjectType.GROUP: groups, ObjectType.CONFIG: configs}
        return only[results_filter] if results_filter else [*groups, *configs]

    def file(self, config_path: str) -> Path:
        """Return the path of a config's file."""
        return Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; one that cannot be read is a problem, and empty."""
        document = self.read(config_path)
        keys = ("defaults",) if not self.whole else document.values
        config = OmegaConf.create({k: document.values[k] for k in keys if k in document.values})
        # Hydra requires `# @package` on the first line; ours may have the command there.
        return ConfigResult(self.provider, self.path, config, {"package": document.package})

    def read(self, config_path: str) -> Document:
        """Return what a file holds, and what is wrong with it; read it once."""
        path = self.file(config_path)
        if path not in self.documents:
            stat = path.stat()
            found = _examined(path, (stat.st_mtime_ns, stat.st_size))
            if found.readable and (wrong := list(self._wrong(found, config_path))):
                named = [dataclasses.replace(p, file=shown_path(path)) for p in wrong]
                found = Document({}, found.lines, [*found.problems, *named], found.package, False)
            self.documents[path] = found
        return self.documents[path]

    def _wrong(self, document: Document, config_path: str) -> Iterator[Problem]:
        """Yield what a file of a configuration may not hold."""
        package = document.package or ""
        if package.split(".")[0] == "hydra" or "hydra" in document.values:
            yield Problem("hydra", NO_HYDRA)
        elif package != "_global_" and re.match("(experiment|debug)/", config_path):
            yield Problem("", "must open with `# @package _global_`, or its keys go astray")
        entries = document.values.get("defaults")
        for entry in entries if isinstance(entries, builtins.list) else []:
            if re.search(r"(^|[\s/@])hydra([/.@]|$)", str(next(iter(entry or [""]), entry))):
                yield Problem("defaults", f"{entry}: {NO_HYDRA}")
            for group, value in entry.items() if isinstance(entry, dict) else ():
                if wrong := self._wrong_choice(str(group), value, config_path):
                    yield Problem("defaults", f"{group}: {wrong}")

    def _wrong_choice(self, entry: str, value: Any, config_path: str) -> str | None:
        *words, group = entry.split() or [""]
        group = group.partition("@")[0]
        here = group.lstrip("/")
        if ".." in Path(f"{group}/{value}").parts:
            return "is outside the folder of configs"
        if "optional" in words and isinstance(value, str):
            here = here if group.startswith("/") else f"{config_path.rpartition('/')[0]}/{here}"
            known = self.is_config(f"{here}/{value}") or (CONF / here / f"{value}.yaml").exists()
            if not known and (self.is_group(here) or (CONF / here).is_dir()):
                return f"there is no {group}={value}"
        return choice_problem(here, value)


def _is_inside(config_path: str) -> bool:
    return not os.path.isabs(config_path) and ".." not in Path(config_path).parts


@dataclass(slots=True)
class Folders:
    """The folders of a composition, the first one wins; Hydra is set up over them."""

    hydra: Any
    folders: builtins.list[Folder]
    documents: dict[Path, Document]  # the files that were read so far, in this order

    def find(self, config_path: str) -> Folder | None:
        """Return the folder that a config is taken from."""
        return next((folder for folder in self.folders if folder.is_config(config_path)), None)

    def is_group(self, group: str) -> bool:
        """Return whether any folder has a group."""
        return any(folder.is_group(group) for folder in self.folders)

    def options(self, group: str) -> builtins.list[str]:
        """Return the choices of a group."""
        having = [folder for folder in self.folders if folder.is_group(group)]
        return sorted({name for f in having for name in f.list(group, ObjectType.CONFIG)})

    @property
    def readable(self) -> bool:
        """Whether all files that were read so far have values."""
        return all(document.readable for document in self.documents.values())

    def meant(self, error: Exception, config_name: str) -> Problem:
        """Return the mistake in a defaults list that an error of Hydra's composition stands for.

        Hydra names a group, or nothing; the entry is looked for in the files that were read, the
        last one first. Where none is found, Hydra's own message is returned in one line.
        """
        text, missing = first_lines(error), getattr(error, "missing_cfg_file", None)
        if isinstance(error, RecursionError):
            lists = [shown_path(p) for p, one in self.documents.items() if "defaults" in one.lines]
            return Problem(
                "defaults", "a list leads back to its own file", file=", ".join(lists[1:])
            )
        if missing == config_name:
            return Problem("", text, did_you_mean(config_name, self.options("")))
        entries = [
            (path, entry[1] or "", entry[2].partition("@")[0], f"{shown_path(path)}:{line}")
            for path, document in self.documents.items()
            for key, line in document.lines.items()
            if (entry := re.fullmatch(r"defaults\.\d+\.(.*\s)?(\S+)", key))
        ]
        known = {name.lstrip("/") for _, _, name, _ in entries}
        for path, words, name, place in reversed(entries):
            group = name.lstrip("/")
            if missing is not None:
                folder, _, choice = missing.rpartition("/")
                if folder == group or f"{path.parent}/{name}".endswith(f"/{folder}"):
                    message = f"there is no {missing}.yaml"
                    way = did_you_mean(choice, self.options(folder))
                    if folder != group and self.is_group(group):
                        message = f"`{name}: {choice}` asks for {missing}.yaml, beside this file"
                        way = f"write `override /{name}: {choice}`"
                    return Problem("defaults", message, way, place)
            elif "override" not in words and re.search(rf"(^|\s){group}(\.| appears)", text):
                way = f"write `override /{group}: ...`"
                return Problem("defaults", f"{group} has a choice already", way, place)
            elif "override" in words and re.search(rf"^In .*override '(\S*/)?{group}['@]", text):
                hint = did_you_mean(group, known - {group})
                if self.is_group(group):
                    hint = f"write `override /{name}: ...`, with a slash"
                if self.is_group(group) and group != name:
                    hint = f"write `{name}: ...`, without the word override"
                message = f"`override {name}`: there is no choice to replace"
                return Problem("defaults", message, hint, place)
        return Problem("", text)


@contextmanager
def opened(arguments: Arguments, whole: bool = False) -> Iterator[Folders]:
    """Set up Hydra over the user's folders and ours, in this order; tear it down at the end."""
    named = [("--config-dir", "command-line", folder) for folder in arguments.config_dirs]
    named.append(("--config-path", "main", arguments.config_path or str(CONF)))
    documents: dict[Path, Document] = {}
    folders = [Folder(check_folder(f, o), provider, documents, whole) for o, provider, f in named]
    # Hydra keeps its instance and the version whose rules it follows in the process, where the
    # caller may have set others.
    rules, before = VersionBase.instance(), GlobalHydra.instance().hydra
    version = rules.version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), "train", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            sources = hydra.config_loader.get_sources()
            sources[:] = [sources[0], *folders, sources[-1]]  # Hydra's own, and its schema
            yield Folders(hydra, folders, documents)
    finally:
        GlobalHydra.instance().hydra, rules.version_base = before, version


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
    raise ConfigError(Problem(option, reason))
