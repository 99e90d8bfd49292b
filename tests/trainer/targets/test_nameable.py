"""All that a configuration can name of ours and of the libraries; nothing else can be."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trainer
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.nameable import LIBRARIES

ROOT = Path(trainer.__file__).parent.parent
PACKAGES = ("callbacks", "conf", "data", "models", "scripts", "trainer")


def nameable(path: str) -> bool:
    try:
        locate(path)
    except TargetError:
        return False
    return True


def test_of_ours_what_yaml_names_and_the_classes_beside_it_can_be_named() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "conf").rglob("*.yaml")]
    named = {path for text in texts for path in re.findall(r"_target_:\s*([\w.]+)", text)}
    ours = {path for path in named if path.partition(".")[0] in PACKAGES}
    for path in ours:
        assert nameable(path), path
    modules = {path.rpartition(".")[0] for path in ours}
    with_classes = {
        module for path in ours for module, _, n in [path.rpartition(".")] if n[0].isupper()
    }
    found = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            if module not in modules:  # checked by the module's name alone
                assert not nameable(f"{module}.Anything")
                continue
            loaded = importlib.import_module(module)
            found |= {f"{module}.{n}" for n in vars(loaded) if nameable(f"{module}.{n}")}
    assert ours <= found
    for path in found - ours:
        module, _, name = path.rpartition(".")
        thing = getattr(sys.modules[module], name)
        assert isinstance(thing, type), path
        assert module in with_classes, path
        assert thing.__module__ == module, path
        assert not name.startswith("_"), path
        assert not issubclass(thing, BaseException), path


def test_what_can_be_named_of_the_libraries_is_public_and_their_own() -> None:
    listed = [name for name in LIBRARIES if name != "timm"]
    for name in listed:
        importlib.import_module(name)
    roots = {name.partition(".")[0] for name in listed}
    found: dict[str, list[str]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] not in roots or not isinstance(module, ModuleType):
            continue
        names = [name for name in sorted(vars(module)) if name.isidentifier()]
        if module_name not in LIBRARIES:  # checked by its name alone: one shows it for all
            names = names[-1:]
        if offered := [name for name in names if nameable(f"{module_name}.{name}")]:
            found[module_name] = offered
    assert set(found) == set(listed)
    for module_name, names in found.items():
        for name in names:
            thing = getattr(sys.modules[module_name], name)
            assert not name.startswith("_")
            assert not isinstance(thing, ModuleType)
            owner = thing.__module__ or ""
            assert "_deprecated" not in owner
            assert owner.partition(".")[0] == module_name.partition(".")[0], (module_name, name)
    assert sum(map(len, found.values())) > 600


@pytest.mark.parametrize("module", sorted(LIBRARIES))
def test_a_module_offers_no_module_and_nothing_private(module: str) -> None:
    for name in ("__init__", "_private", "os.system", "sys.modules", "__class__"):
        assert not nameable(f"{module}.{name}")
