"""From overrides and files to a checked configuration, collecting all mistakes."""

from typing import Any

# Hydra's public compose() also reads Hydra's settings and does not return which files it merged.
# Together with compute_defaults_list(), which does, it takes 2.4 times as long.
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.hydra import Hydra  # see `sources`
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from conf.check import check, fill_defaults, shown
from conf.errors import ConfigError, Problem
from conf.interpolation import interpolation_problems, taken_from
from scripts.cli.arguments import Arguments
from scripts.composition.argument_names import argument_problems
from scripts.composition.kept import Merged, keep, recall
from scripts.composition.leftovers import unread_problems, without_leftovers
from scripts.composition.meant import meant
from scripts.composition.origins import Notes, Origins, Placed
from scripts.composition.overrides import Overrides
from scripts.composition.sources import ExaminedSource
from scripts.composition.trees import (
    UNRESOLVED,
    escape_reserved,
    first_lines,
    keys_below,
    resolution_problems,
    unfinished,
    without,
)
from trainer.targets.instantiate import refused_targets
from trainer.targets.renamed import with_present_targets

# What Hydra raises for invalid input, including its asserts.
_HYDRA_FAILS = (*UNRESOLVED, HydraException, AssertionError, KeyError, IndexError)


class Composition:
    """From overrides to a checked configuration, collecting all mistakes."""

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
        self.choices: dict[str, Any] = {}  # the choice for each group

    def checked(self) -> dict[str, Any]:
        """Return the configuration. Raises ConfigError with all mistakes."""
        tree, self.choices = self.unresolved()
        self.origins.taken_from = taken_from(tree)
        raw: dict[str, Any] = with_present_targets(self.resolved(tree))
        self.check(raw)
        self.stop_if_wrong()
        return raw

    def check(self, raw: dict[str, Any], incomplete: bool = False) -> None:
        """Check a tree against the schema; unresolved values are skipped."""
        open_keys = {p.key for p in self.problems} | set(unfinished(raw, incomplete))
        self.problems += [p for p in check(raw) if p.key not in open_keys]
        refused = refused_targets(raw)
        self.problems += refused
        away = {*open_keys, *(p.key.removesuffix("._target_") for p in refused)}
        # The signatures are checked once there are no mistakes. What the user wrote is looked at
        # before, without torch; nothing else needs to be then.
        found = argument_problems(raw, "", bool if self.found() else self.origins.of_user)
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
        chosen = [text.lstrip("+").partition("=")[0].replace("/", ".") for text in picked]
        tree = without_leftovers({str(k): v for k, v in container.items()}, self.origins, chosen)
        self.problems += unread_problems(tree, self.origins)
        return fill_defaults(tree), choices

    def found(self) -> list[Problem]:
        """Return all mistakes so far, each with its file."""
        return [*self.notes.problems, *map(self.origins.located, self.problems)]

    def stop_if_wrong(self) -> None:
        """Raise ConfigError if there are mistakes so far."""
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
        if (kept := recall(self.arguments, choices)) is not None:
            self.notes.documents |= kept.documents
            self.origins.files = list(kept.files)
            return kept.tree, dict(kept.choices)
        try:
            listed = self._listed(choices)
            cfg = self.loader._compose_config_from_defaults_list(listed.defaults, self.repository)
        except _HYDRA_FAILS as error:
            if self.notes.readable:
                name = self.arguments.config_name
                self.problems.append(meant(error, self.notes.documents, self.repository, name))
            self.stop_if_wrong()
            raise
        self.origins.files = [p for d in listed.defaults if (p := self._placed(d)) is not None]
        known = dict(listed.overrides.known_choices)
        if not self.notes.problems:
            documents = self.notes.documents
            keep(self.arguments, choices, Merged(cfg, known, self.origins.files, documents))
        return cfg, known

    def _placed(self, default: ResultDefault) -> Placed | None:
        path = default.config_path or ""
        source = next((s for s in self.repository.get_sources() if s.is_config(path)), None)
        if isinstance(source, ExaminedSource):
            return Placed(source.file(path), default.package or "", default.primary)
        return None

    def _apply(self, override: Override, cfg: DictConfig) -> None:
        """Apply an override; a missing key is added, and checked by the schema later."""
        assert override.input_line is not None
        key = override.key_or_group
        try:
            problem = _applied(override, cfg)
        except _HYDRA_FAILS as error:
            problem = first_lines(error)
        if problem is not None:
            self.overrides.note(key, problem)
        for name in (key, *keys_below(override.value(), key)):
            self.origins.overrides[name] = override.input_line

    def resolved(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with its interpolations resolved, or unchanged if one cannot be."""
        found = interpolation_problems(raw)
        self.problems += found
        sound = without(raw, {problem.key for problem in found}) if found else raw
        if found and interpolation_problems(sound):
            return raw
        cfg = OmegaConf.create(escape_reserved(sound))
        try:
            return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
        except UNRESOLVED:
            self.problems += resolution_problems(cfg, "")
            return sound


def _applied(override: Override, cfg: DictConfig) -> str | None:
    """Apply an override to `cfg`; return what is wrong with it, if anything."""
    key, value = override.key_or_group, override.value()
    if override.package is not None:
        return f"{override.input_line} chooses in a group, but there is no group {key!r}"
    if not override.is_delete():
        if isinstance(value, list) and isinstance(_present(cfg, key), DictConfig):
            return f"expected a section of keys, got {shown(value)}"
        OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        return None
    present = _present(cfg, key)
    if present is None:
        return "cannot be deleted: it does not exist"
    if value is not None and value != present:
        return f"cannot be deleted: it is {present}, not {value}"
    section, _, name = key.rpartition(".")
    del (OmegaConf.select(cfg, section) if section else cfg)[name]
    return None


def _present(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_missing=False)
