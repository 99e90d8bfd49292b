"""What a configuration may name, and what it may not."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.targets import allow_list as targets
from trainer.targets.allow_list import TargetError, locate, refusal
from trainer.targets.instantiate import instantiate, refused_targets


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the further packages that are allowed: none, until one is added."""
    allowed: list[str] = []
    monkeypatch.setattr(targets, "_extra", allowed)
    return allowed


@pytest.mark.parametrize(
    "path",
    [
        "torch.nn.Linear",
        "torch.nn.functional.gelu",
        "torch.nn.Embedding.from_pretrained",
        "torch.optim.SGD",
        "torch.optim.lr_scheduler.LambdaLR",
        "torch.utils.data.WeightedRandomSampler",
        "torch.utils.data.default_collate",
        "torchvision.models.resnet18",
        "torchvision.transforms.v2.ColorJitter",
        "torchvision.datasets.FakeData",
        "models.mlp.MLP",
        "trainer.optimizers.muon.Muon",
    ],
)
def test_what_may_be_named(path: str) -> None:
    assert callable(locate(path))
    assert refusal(path) is None


@pytest.mark.parametrize(
    "path",
    ["", ".", "torch.nn.", "torch..nn", "a b.c", "torch.nn.__class__", "x" * 400, 5, None, []],
)
def test_what_is_no_path(path: Any) -> None:
    assert "dotted path" in (refusal(path) or "")


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(TargetError, match=r"torch\.nn has no 'Linaer'; did you mean Linear"):
        locate("torch.nn.Linaer")


def test_a_refusal_tells_how_to_allow() -> None:
    assert "--allow-target somewhere" in (refusal("somewhere.deep.Net") or "")
    assert "--allow-target transformers`" in (refusal("transformers.AutoModel") or "")


def test_refused_names_are_listed_with_their_keys() -> None:
    node = {"_target_": "torch.nn.Identity", "x": [{"_target_": "os.system"}], "y": {"_target_": 3}}
    assert [p.key for p in refused_targets(node, "model")] == [
        "model.x.0._target_",
        "model.y._target_",
    ]


def test_packages_of_the_working_folder_may_be_named(folder: Path) -> None:
    (folder / "my_own.py").write_text("class Net:\n    pass\n")
    package = folder / "my_package" / "deep"
    package.mkdir(parents=True)
    for made in (package.parent, package):
        (made / "__init__.py").touch()
    (package / "nets.py").write_text("def build():\n    return 3\n")
    assert instantiate({"_target_": "my_own.Net"}).__class__.__name__ == "Net"
    assert instantiate({"_target_": "my_package.deep.nets.build"}) == 3
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("file", "packages"),
    [
        pytest.param("runs/received/payload.py", [], id="a-received-run"),
        pytest.param("runs/received/payload.py", ["runs", "runs/received"], id="packages-in-runs"),
        pytest.param("stranger/payload.py", [], id="any-folder"),
        pytest.param("stranger/payload.py", ["stranger"], id="a-folder-of-configurations"),
        pytest.param("mine/stranger/payload.py", ["mine"], id="below-a-package"),
    ],
)
def test_no_code_comes_from_folders_that_are_not_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, packages: list[str]
) -> None:
    place = folder / file
    place.parent.mkdir(parents=True)
    for package in packages:
        (folder / package / "__init__.py").touch()
    place.write_text(f"open({str(folder / 'canary')!r}, 'w')\nclass Model: ...\n")
    monkeypatch.setattr(targets, "_closed", [])
    targets.close([str(folder / "stranger")])
    path = f"{file.removesuffix('.py').replace('/', '.')}.Model"
    assert "not allowed" in (refusal(path) or "")
    with pytest.raises(TargetError, match="not allowed"):
        locate(path)
    assert not (folder / "canary").exists()


def test_a_project_that_holds_its_configurations_may_be_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_project" / "conf").mkdir(parents=True)
    (folder / "my_project" / "__init__.py").touch()
    (folder / "my_project" / "nets.py").write_text("class Net: ...\n")
    monkeypatch.setattr(targets, "_closed", [])
    targets.close([str(folder), str(folder / "my_project" / "conf")])
    assert refusal("my_project.nets.Net") is None


def test_a_misspelt_package_of_the_user_gets_the_nearest(folder: Path) -> None:
    (folder / "my_networks.py").touch()
    assert "did you mean my_networks?" in (refusal("my_netwroks.Net") or "")


def test_a_package_of_the_user_does_not_open_others(folder: Path) -> None:
    lines = (
        "import os",
        "from os import system",
        "import torch",
        "class Net:\n    def run(self): ...",
    )
    (folder / "my_doors.py").write_text("\n".join(lines))
    doors = ("my_doors.os.system", "my_doors.system", "my_doors.torch.load", "my_doors.Net.run")
    for path in doors:
        with pytest.raises(TargetError, match="not allowed"):
            locate(path)


def test_the_working_folder_does_not_stand_in_for_what_is_installed(folder: Path) -> None:
    for name in ("json", "yaml", "torch", "os", "models"):
        (folder / f"{name}.py").write_text("raise SystemExit('ran')\n")
    for path in ("json.loads", "yaml.load", "os.system"):
        assert "not allowed" in (refusal(path) or "")
    assert locate("models.mlp.MLP").__module__ == "models.mlp"


def test_a_package_elsewhere_on_the_path_is_not_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sneaky_thing.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert "not allowed" in (refusal("sneaky_thing.run") or "")


def test_nothing_is_imported_to_check_a_name(folder: Path) -> None:
    (folder / "my_loud.py").write_text("raise SystemExit('ran')\n")
    assert refusal("my_loud.Net") is None
    assert "my_loud" not in sys.modules


def test_what_fails_within_the_users_module_comes_through(folder: Path) -> None:
    (folder / "my_broken.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        locate("my_broken.Net")


def test_allowed_packages_are_those_and_what_is_theirs(extra: list[str]) -> None:
    targets.allow(["json"])
    assert locate("json.loads")("3") == 3
    assert targets.allowed_extra() == ("json",)
    with pytest.raises(TargetError, match="not allowed"):
        locate("json.decoder.re.compile")
    assert "not allowed" in (refusal("jsonx.loads") or "")


def test_allowing_takes_paths_only(extra: list[str]) -> None:
    with pytest.raises(TargetError, match="--allow-target"):
        targets.allow(["../evil"])
    assert extra == []
