"""What a configuration may name, and what it may not: all of ours and of the libraries."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trainer
from trainer.targets import allow_list as targets
from trainer.targets.allow_list import LIBRARIES, TargetError, locate, refusal
from trainer.targets.instantiate import instantiate, refused_targets

ROOT = Path(trainer.__file__).parent.parent
PACKAGES = ("callbacks", "conf", "data", "models", "scripts", "trainer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder; what is imported from it, allowed and closed, is forgotten."""
    monkeypatch.setattr(targets, "_extra", [])
    monkeypatch.setattr(targets, "_closed", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.startswith(str(tmp_path)):
            del sys.modules[name]


def nameable(path: str) -> bool:
    try:
        locate(path)
    except TargetError:
        return False
    return True


def test_of_ours_what_yaml_names_and_the_classes_beside_it_can_be_named() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "conf").rglob("*.yaml")]
    named = {path for text in texts for path in re.findall(r"_target_:\s*([\w.]+)", text)}
    ours = {tuple(path.rsplit(".", 1)) for path in named if path.partition(".")[0] in PACKAGES}
    found = set()
    for file in [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]:
        module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        if module in {module for module, _ in ours}:
            names = vars(importlib.import_module(module))
            found |= {(module, n) for n in names if nameable(f"{module}.{n}")}
        else:  # checked by the module's name alone
            assert not nameable(f"{module}.Anything")
    assert ours <= found
    for module, name in found - ours:
        thing = getattr(sys.modules[module], name)
        assert isinstance(thing, type), name
        assert not issubclass(thing, BaseException), name
        assert any(other == module and n[0].isupper() for other, n in ours), name
        assert (thing.__module__, name[0] == "_") == (module, False), name


def test_what_can_be_named_of_the_libraries_is_public_and_their_own() -> None:
    listed = {name: importlib.import_module(name) for name in LIBRARIES if name != "timm"}
    roots = {name.partition(".")[0] for name in listed}
    found = set()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in roots or not isinstance(module, ModuleType):
            continue
        names = [one for one in sorted(vars(module)) if one.isidentifier()]
        if name not in LIBRARIES:  # checked by its name alone: one shows it for all
            names = names[-1:]
        found |= {(name, one) for one in names if nameable(f"{name}.{one}")}
    assert {name for name, _ in found} == set(listed)
    for module, name in found:
        thing = getattr(sys.modules[module], name)
        assert not name.startswith("_")
        assert not isinstance(thing, ModuleType)
        owner = thing.__module__ or ""
        assert "_deprecated" not in owner
        assert owner.partition(".")[0] == module.partition(".")[0], (module, name)
    assert len(found) > 600


def test_the_name_alone_is_looked_at_first() -> None:
    paths = "torch.nn.Linear torch.nn.functional.gelu torch.nn.Embedding.from_pretrained"
    paths += " torch.optim.SGD torch.utils.data.default_collate torchvision.models.get_model"
    for path in f"{paths} torchvision.transforms.v2.ColorJitter models.mlp.MLP".split():
        assert refusal(path) is None
        assert callable(locate(path))
    odd: list[Any] = ["", ".", "torch.nn.", "torch..nn", "a b.c", "torch.nn.__class__", 5, None, []]
    for path in [*odd, "x" * 400]:
        assert "dotted path" in (refusal(path) or "")
    for module in LIBRARIES:
        for name in ("__init__", "_private", "os.system", "sys.modules"):
            assert refusal(f"{module}.{name}")


def test_a_refusal_names_the_key_the_nearest_name_and_the_way_out(folder: Path) -> None:
    with pytest.raises(TargetError, match=r"torch\.nn has no 'Linaer'; did you mean Linear"):
        locate("torch.nn.Linaer")
    assert "--allow-target somewhere" in (refusal("somewhere.deep.Net") or "")
    assert "--allow-target transformers`" in (refusal("transformers.AutoModel") or "")
    (folder / "my_networks.py").touch()
    assert "did you mean my_networks.Net?" in (refusal("my_netwroks.Net") or "")
    assert "such as torch.nn.Linear" in (refusal("torch.nn.modules.linear.Linear") or "")
    node = {"_target_": "torch.nn.Identity", "x": [{"_target_": "os.system"}], "y": {"_target_": 3}}
    keys = [p.key for p in refused_targets(node, "model")]
    assert keys == ["model.x.0._target_", "model.y._target_"]


def test_packages_of_the_working_folder_may_be_named(folder: Path) -> None:
    package = folder / "my_package" / "deep"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "nets.py").write_text("def build():\n    return 3\n")
    targets.close([str(folder), str(package / "conf")])  # a project that holds its configurations
    assert instantiate({"_target_": "my_package.deep.nets.build"}) == 3
    assert sys.path[-1] == str(folder)
    (folder / "my_broken.py").write_text("import no_such_module_anywhere\n")
    assert refusal("my_broken.Net") is None  # the name is checked without an import
    assert "my_broken" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        locate("my_broken.Net")


@pytest.mark.parametrize(
    ("file", "packages"),
    [
        ("runs/received/payload.py", []),
        ("runs/received/payload.py", ["runs", "runs/received"]),
        ("stranger/payload.py", []),
        ("stranger/payload.py", ["stranger"]),  # a folder of configurations
        ("mine/stranger/payload.py", ["mine"]),
    ],
)
def test_no_code_comes_from_folders_that_are_not_packages(
    folder: Path, file: str, packages: list[str]
) -> None:
    place = folder / file
    place.parent.mkdir(parents=True)
    for package in packages:
        (folder / package / "__init__.py").touch()
    place.write_text(f"open({str(folder / 'canary')!r}, 'w')\nclass Model: ...\n")
    targets.close([str(folder / "stranger")])
    path = f"{file.removesuffix('.py').replace('/', '.')}.Model"
    assert "not allowed" in (refusal(path) or "")
    with pytest.raises(TargetError, match="not allowed"):
        locate(path)
    assert not (folder / "canary").exists()


def test_a_package_of_the_user_does_not_open_others(folder: Path) -> None:
    (folder / "my_doors.py").write_text(
        "import os, torch\nfrom os import system\nclass Net:\n    def run(self): ...\n"
        "from data.batch import map_leaves\nfrom torch.nn import Linear\n"
        "from trainer.files.atomic import AppendLog\nfrom torch.nn.utils import skip_init\n"
    )
    doors = ("os.system", "system", "torch.load", "Net.run")
    for path in (*doors, "map_leaves", "AppendLog", "skip_init"):
        with pytest.raises(TargetError, match="not allowed"):
            instantiate({"_target_": f"my_doors.{path}"})
    made = instantiate({"_target_": "my_doors.Linear", "in_features": 1, "out_features": 2})
    assert made.out_features == 2


def test_the_working_folder_does_not_stand_in_for_what_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(str(folder / "elsewhere"))
    for name in ("json", "yaml", "torch", "os", "models", "elsewhere/sneaky_thing"):
        (folder / f"{name}.py").write_text("raise SystemExit('ran')\n")
    for path in ("json.loads", "yaml.load", "os.system", "sneaky_thing.run"):
        assert "not allowed" in (refusal(path) or "")
    assert locate("models.mlp.MLP").__module__ == "models.mlp"


def test_allowed_packages_are_those_and_what_is_theirs(folder: Path) -> None:
    targets.allow(["json"])
    assert locate("json.loads")("3") == 3
    with pytest.raises(TargetError, match="not allowed"):
        locate("json.decoder.re.compile")
    assert "not allowed" in (refusal("jsonx.loads") or "")
    with pytest.raises(TargetError, match="--allow-target"):
        targets.allow(["../evil"])
    assert targets._extra == ["json"]
