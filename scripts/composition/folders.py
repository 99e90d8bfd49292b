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
# The rules by which Hydra 1.3 composes; Hydra 1.4 follows them by itself and takes no parameter.
_RULES = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
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

    Hydra is given their defaults lists only: `Tree` merges what they hold.
    """

    def __init__(self, folder: Path, provider: str, together: "Folders") -> None:
        self.path, self.provider = str(folder), provider
        self.together = together  # all folders, this one among them

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
        taken = {k: v for k, v in document.values.items() if self.together.whole or k == "defaults"}
        entries = taken.get("defaults")
        if isinstance(entries, list):
            taken["defaults"] = _last_words(entries)
        config = OmegaConf.create(taken)
        # Hydra requires `# @package` on the first line; ours may have the command there.
        return ConfigResult(self.provider, self.path, config, {"package": document.package})

    def read(self, config_path: str) -> Document:
        """Return what a file holds, and what is wrong with it; read it once."""
        path, documents = self.file(config_path), self.together.documents
        if path not in documents:
            stat = path.stat()
            found = _examined(path, (stat.st_mtime_ns, stat.st_size))
            if found.readable and (wrong := list(self._wrong(found, config_path))):
                problems = [*found.problems, *wrong]
                found = Document({}, found.lines, problems, found.package, False)
            documents[path] = found
        return documents[path]

    def _wrong(self, document: Document, config_path: str) -> Iterator[Problem]:
        """Yield what a file of a configuration may not hold."""
        package, shown = document.package or "", shown_path(self.file(config_path))
        if package.split(".")[0] == "hydra" or "hydra" in document.values:
            yield Problem("hydra", NO_HYDRA, file=shown)
        elif package != "_global_" and re.match("(experiment|debug)/", config_path):
            message = "must open with `# @package _global_`, or its keys go astray"
            yield Problem("", message, file=shown)
        entries = document.values.get("defaults")
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            for text, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
                for wrong in self._wrong_choices(str(text), value, config_path.rpartition("/")[0]):
                    line = document.lines.get(f"defaults.{number}" + (f".{text}" if text else ""))
                    yield Problem("defaults", *wrong, file=f"{shown}:{line}" if line else shown)

    def _wrong_choices(self, text: str, value: Any, here: str) -> Iterator[tuple[str, str | None]]:
        """Say what is wrong with an entry of a defaults list in the group `here`, and the way out.

        Without `text`, before a colon, the value names a file.
        """
        *words, name = (text or str(value)).partition("@")[0].split() or [""]
        inside = os.path.join(here, name).lstrip("/")
        known, group, groups = self.together, name.lstrip("/"), self.together.chosen
        override = f"write `override /{group}: {value}`"
        if re.search(r"(^|[\s/@])hydra([\s/.@]|$)", text or str(value)):
            yield f"{text or value}: {NO_HYDRA}", None
        elif ".." in Path(f"{name}/{value}").parts:
            yield f"{name}: is outside the folder of configs", None
        elif problem := choice_problem(group, value) if text else None:
            yield f"{group}: {problem}", None
        elif "override" in words and not known.is_group(inside):
            hint = override if known.is_group(group) else did_you_mean(inside, groups)
            yield f"`{text}`: there is no group {inside}", hint
        elif text.startswith("/") and "@" not in text and group in groups:
            yield f"{group} has a choice already", override
        else:
            for choice in value if isinstance(value, list) else [value]:
                file, somewhere = f"{inside}/{choice}" if text else inside, known.is_group(inside)
                if not isinstance(choice, str) or "${" in file or name == "_self_":
                    continue
                if known.find(file) is None and (somewhere or "optional" not in words):
                    meant = text and known.is_group(group) and not somewhere
                    hint = override if meant else did_you_mean(choice, known.options(inside))
                    yield f"there is no {file}.yaml", hint


def _last_words(entries: list[Any]) -> list[Any]:
    """Return a defaults list without choices that a later one replaces: Hydra takes the first."""
    kept = list[Any]()
    replaced = set[str]()
    for entry in reversed(entries):
        words = str(next(iter(entry), "")).split() if isinstance(entry, dict) else []
        if "override" in words:
            if words[-1] in replaced:
                continue
            replaced.add(words[-1])
        kept.append(entry)
    return kept[::-1]


def _is_inside(config_path: str) -> bool:
    return not os.path.isabs(config_path) and ".." not in Path(config_path).parts


@dataclass(slots=True)
class Folders:
    """The folders of a composition, the first one wins; Hydra is set up over them."""

    hydra: Any
    whole: bool  # Hydra is given all that the files hold: it prints that itself
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
        having = [folder for folder in self.folders if folder.is_group(group)]
        return sorted({name for f in having for name in f.list(group, ObjectType.CONFIG)})

    @property
    def chosen(self) -> list[str]:
        """The groups that the primary config, which is read first, chooses in."""
        first = next(iter(self.documents.values()), Document())
        return [m[1] for key in first.lines if (m := re.match(r"defaults\.\d+\./?([^@\s]+)", key))]

    @property
    def readable(self) -> bool:
        """Whether all files that were read so far have values."""
        return all(document.readable for document in self.documents.values())

    def meant(self, error: Exception, config_name: str) -> Problem:
        """Return the mistake that an error of Hydra's composition stands for."""
        if isinstance(error, RecursionError):
            lists = [shown_path(p) for p, one in self.documents.items() if "defaults" in one.lines]
            message = "a list leads back to its own file"
            return Problem("defaults", message, file=", ".join(lists[1:]))
        found = re.match(r"Could not override '([^'@]+)'\. No match", str(error))
        if found:
            group, (*_, value) = found[1], str(error).rpartition("=")
            if not self.chosen:
                message = f"{config_name}.yaml holds values, and chooses in no group"
                hint = f"set keys of it: {group.replace('/', '.')}.KEY=VALUE"
            elif value == "[]":
                message, hint = "has no choice that could be left out", None
            else:
                message, hint = "has no choice that could be replaced", f"add one: +{group}={value}"
            return Problem(group, message, hint, "command line")
        missing = getattr(error, "missing_cfg_file", None) == config_name
        hint = did_you_mean(config_name, self.options("")) if missing else None
        return Problem("", first_lines(error), hint)


@contextmanager
def opened(arguments: Arguments) -> Iterator[Folders]:
    """Set up Hydra over the user's folders and ours, in this order; tear it down at the end."""
    named = [("--config-dir", "command-line", folder) for folder in arguments.config_dirs]
    named.append(("--config-path", "main", arguments.config_path or str(CONF)))
    places = [(check_folder(folder, option), provider) for option, provider, folder in named]
    # Hydra keeps its instance and the version whose rules it follows in the process, where the
    # caller may have set others.
    rules, before = VersionBase.instance(), GlobalHydra.instance().hydra
    version = rules.version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), "train", **_RULES):
            composer = GlobalHydra.instance().hydra
            assert composer is not None
            it = Folders(composer, whole=arguments.cfg in ("hydra", "all"))
            it.folders += [Folder(path, provider, it) for path, provider in places]
            sources = composer.config_loader.get_sources()
            sources[:] = [sources[0], *it.folders, sources[-1]]  # Hydra's own, and its schema
            yield it
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
    raise ConfigError(option, reason)
