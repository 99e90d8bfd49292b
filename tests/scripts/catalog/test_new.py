"""`regimen new`: a project that trains without changes."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.cli.shadow import PACKAGES, ROOT
from scripts.composition.compose import compose, split_jobs
from scripts.new import new, project_files
from scripts.regimen import COMMANDS


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert new(["flowers"]) == 0
    monkeypatch.chdir(tmp_path / "flowers")
    return tmp_path / "flowers"


def test_it_trains_at_once(project: Path) -> None:
    words = ["--config-dir", "conf", "experiment=mine", "trainer.max_epochs=2", "run_dir=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scripts.train", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    status = json.loads((project / "run/status.json").read_text())
    assert status["state"] == "finished"
    assert status["results"]["test/accuracy"] > 0.8
    title, *epochs = (project / "run/diary.txt").read_text().splitlines()
    assert (title, len(epochs)) == ("mine", 2)
    assert float(epochs[-1]) == pytest.approx(status["results"]["val/accuracy"], abs=1e-3)


def test_its_own_tests_pass(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    try:
        path = project / "tests" / "test_mine.py"
        spec = importlib.util.spec_from_file_location("tests_of_a_new_project", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = [thing for name, thing in vars(module).items() if name.startswith("test_")]
        assert len(tests) == 2
        for test in tests:
            test()
    finally:
        sys.modules.pop("mine", None)


def test_the_commands_of_its_readme_are_sound(project: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(words[:2] == ["uv", "run"] for words in lines)
    for command, *words in (words[2:] for words in lines):
        if command == "train" and "-m" in words:
            assert len(split_jobs(parse_arguments(words))) == 2
        elif command == "train":
            assert compose(words).config["name"] == "mine"
        else:
            assert command == "pytest" or words[0] in COMMANDS


def test_it_depends_on_this_clone_and_hides_none_of_its_packages(project: Path) -> None:
    facts = tomllib.loads((project / "pyproject.toml").read_text())
    assert facts["project"]["name"] == "flowers"
    source = facts["tool"]["uv"]["sources"]["regimen"]
    assert (project / source["path"]).resolve() == ROOT
    assert source["editable"]
    texts = [path.read_text() for path in project.rglob("*") if path.is_file()]
    absolute = re.compile(rf"(?<!\.\.){re.escape(str(ROOT))}")
    assert not any(map(absolute.search, texts))  # a team shares the project
    assert not {path.stem for path in project.rglob("*.py")} & set(PACKAGES)
    (config,) = (project / "conf").rglob("*.yaml")
    (schema,) = re.findall(r"\$schema=(.*)", config.read_text())
    assert json.loads((config.parent / schema).read_text())["title"] == "experiment"


def test_a_name_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 100 letters"):
        new([str(tmp_path / ("n" * 300))])


@pytest.mark.parametrize(
    ("title", "name"),
    [
        pytest.param("My Flowers!", "my-flowers", id="spaces"),
        pytest.param("花", "project", id="no letters"),
        pytest.param("Regimen", "my-regimen", id="ours"),
    ],
)
def test_any_folder_gives_a_name_that_can_be_installed(title: str, name: str) -> None:
    text = project_files(title, '/a "quoted" \\ folder')["pyproject.toml"]
    facts = tomllib.loads(text)
    assert facts["project"]["name"] == name
    assert facts["tool"]["uv"]["sources"]["regimen"]["path"] == '/a "quoted" \\ folder'


def test_a_folder_with_something_in_it_is_left_alone(project: Path) -> None:
    (project / "mine.py").write_text("mine")
    with pytest.raises(ConfigError, match="no empty folder"):
        new([str(project)])
    with pytest.raises(ConfigError, match="no empty folder"):
        new([str(project / "mine.py")])
    assert (project / "mine.py").read_text() == "mine"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert new([str(tmp_path / "a b")]) == 0
    assert (tmp_path / "a b" / "mine.py").exists()
