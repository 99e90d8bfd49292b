"""What is installed: wheel, archive of the sources, one import name beside others' code."""

import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from collections import Counter

import pytest
import yaml

from regimen.conf import layout
from regimen.conf.layout import PACKAGES, ROOT
from regimen.scripts import catalog
from regimen.scripts.catalog import project_files
from regimen.trainer.runs.directory import installed_record

SHIPPED = (*PACKAGES, "template")


def build(source, target, *kinds):
    """Build a wheel, an sdist or both as `pip` would, without an environment of their own."""
    command = [sys.executable, "-m", "hatchling", "build", *kinds, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    return sorted(target.iterdir())


def files_of(wheel):
    """Return the number of files of each part of `regimen` in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name.split("/") for name in archive.namelist()]
    return Counter(parts[1] for parts in names if parts[0] == "regimen")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return a folder that holds the wheel's files, as site-packages does."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_and_the_one_made_from_the_sources_hold_all_files(built, tmp_path):
    wheel, sources = built
    expected = Counter({"__init__.py": 1, "__main__.py": 1, "py.typed": 1})
    for package in SHIPPED:
        found = [path for path in (ROOT / package).rglob("*") if path.is_file()]
        expected[package] = sum("__pycache__" not in path.parts for path in found)
    assert files_of(wheel) == expected
    # hatchling follows the links in src/regimen and takes each folder once: if it took those there,
    # the packages at the top would be missing, and nothing would say so.
    with tarfile.open(sources) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (again,) = build(unpacked, tmp_path / "again", "-t", "wheel")
    assert files_of(again) == expected


def run(site, folder, *words, **environment):
    """Run Python in a folder as a user does, with the installed copy first on the path."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    known |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=known, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_import_is_light_and_the_names_are_there(installed, tmp_path):
    code = """
        import sys, regimen
        assert "torch" not in sys.modules
        print(regimen.__path__)
        assert {"Trainer", "TrainerOptions", "Callback", "Task", "StepOutput"} <= set(dir(regimen))
        from regimen import Callback, StepOutput, Task, Trainer, TrainerOptions
        from regimen import build, compose, load_run, loader
        import regimen.trainer
        assert regimen.trainer.Trainer is Trainer
        try:
            regimen.nothing
        except AttributeError as error:
            print(error)
    """
    printed = run(installed, tmp_path, "-c", textwrap.dedent(code)).splitlines()
    assert printed == [f"['{installed}/regimen']", "module 'regimen' has no attribute 'nothing'"]


# A user's own modules, each with the name of a package of ours.
OWN = {
    "data.py": """
        import torch
        class Samples(torch.utils.data.TensorDataset):
            def __init__(self, count):
                inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
                super().__init__(inputs, (inputs.sum(1) > 0).long())
    """,
    "models/__init__.py": "",
    "models/net.py": """
        from torch import nn
        class Net(nn.Sequential):
            def __init__(self, width):
                super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    """,
    "callbacks/__init__.py": "",
    "callbacks/mine.py": """
        from regimen import Callback
        class Shout(Callback):
            def on_fit_end(self, trainer):
                print("shouted at step", trainer.state.global_step)
    """,
    "trainer.py": "raise RuntimeError('nobody imports this one')",
    "scripts/__init__.py": "",
    "conf/experiment/mine.yaml": """
        # train --config-dir conf experiment=mine
        # @package _global_
        defaults:
          - override /transforms: none
        name: mine
        model: {_target_: models.net.Net, width: 4}
        data:
          num_classes: 2
          train: {_target_: data.Samples, count: 32}
          val: {_target_: data.Samples, count: 8}
        callbacks:
          shout: {_target_: callbacks.mine.Shout}
        loader: {batch_size: 8, num_workers: 1}
        trainer: {max_steps: 2}
    """,
}


@pytest.fixture
def project(tmp_path):
    for name, text in OWN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copy", "command"),
    [
        pytest.param("wheel", ["-m", "regimen", "train"], id="installed"),
        pytest.param("checkout", ["-P", "-m", "regimen.scripts.train"], id="checkout"),
        pytest.param("checkout", ["-m", "regimen.scripts.train"], id="ddp"),
    ],
)
def test_a_projects_own_data_models_and_callbacks_stand_beside_ours(
    installed, project, request, copy, command
):
    site = installed if copy == "wheel" else ROOT / "src"
    words = [*command, "--config-dir", "conf", "experiment=mine", "run_dir=run"]
    if "ddp" in request.node.callspec.id:
        words += ["strategy=ddp", "strategy.devices=2"]
    assert "shouted at step 2" in run(site, project, *words)
    manifest = json.loads((project / "run" / "manifest.json").read_text())
    code = manifest["code"]
    assert code["path"] == str(site / "regimen" if copy == "wheel" else ROOT)
    assert ("version" in code) == (copy == "wheel")


@pytest.mark.slow
def test_a_project_is_written_from_an_installed_copy(installed, tmp_path):
    run(installed, tmp_path, "-m", "regimen", "new", "flowers")
    words = ["--config-dir", "conf", "experiment=mine", "dry_run=true"]
    assert "Plan of mine" in run(installed, tmp_path / "flowers", "-m", "regimen", "train", *words)
    run(installed, tmp_path / "flowers", "-m", "pytest", "-q", "-p", "no:cacheprovider")


GIT = {"url": "https://example.com/regimen", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("record", "source", "commit"),
    [
        pytest.param(GIT, {"git": "https://example.com/regimen", "rev": "abc"}, "abc", id="git"),
        pytest.param(
            {"url": "file:///my%20clones/regimen", "dir_info": {}},
            {"path": "/my clones/regimen"},
            None,
            id="folder",
        ),
        pytest.param(
            {"url": "https://example.com/regimen.zip", "archive_info": {}},
            {"url": "https://example.com/regimen.zip"},
            None,
            id="file",
        ),
        pytest.param({}, {}, None, id="index"),
    ],
)
def test_an_installed_copy_knows_where_it_is_from(monkeypatch, tmp_path, record, source, commit):
    for module in (catalog, sys.modules[installed_record.__module__]):
        monkeypatch.setattr(module, "installed_from", lambda: record)
        monkeypatch.setattr(module, "is_checkout", lambda: False)
    assert catalog._source(tmp_path) == source
    assert installed_record()["commit"] == commit
    sources = tomllib.loads(project_files("x", source)["pyproject.toml"])["tool"]["uv"].get(
        "sources"
    )
    assert sources == ({"torch-regimen": source} if source else None)


def test_code_that_is_only_on_the_path_has_no_version(monkeypatch):
    monkeypatch.setattr(layout, "DISTRIBUTION", "no-such-distribution")
    assert layout.installed_version() == "not installed"
    assert layout.installed_from() == {}


def test_the_workflow_runs_the_scripts_that_must_pass() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["test"]
    scripts = job["strategy"]["matrix"]["script"]
    assert sorted(scripts) == sorted(f".ci/{path.name}" for path in (ROOT / ".ci").iterdir())
    assert scripts[0] == ".ci/run"
    # The scripts are the whole of it: a step of the workflow that they lack would run nowhere else.
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash ${{ matrix.script }}"]


def test_the_extra_all_holds_every_extra_of_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"all", "dev", "docs", "ray"}
    named = re.findall(r"[\w-]+(?=[,\]])", " ".join(project["optional-dependencies"]["all"]))
    assert set(named) == extras
