"""`regimen ls` lists the configs, and `regimen cp` copies one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.composition.compose import compose
from scripts.composition.folders import CONF
from scripts.ls import description, ls
from scripts.new import cp, shown_use


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\n# What I am after.\nname: mine\n")
    return file


def test_every_group_and_choice_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    ls([])
    listed, group = set(), ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(" "):
            listed.add(f"{group}/{line.split()[0]}")
        else:
            group = line
    shipped = {p.relative_to(CONF).with_suffix("").as_posix() for p in CONF.rglob("*/*.yaml")}
    assert listed == shipped


def test_every_shipped_file_says_what_it_is_for() -> None:
    assert [path for path in CONF.rglob("*/*.yaml") if not description(path)] == []


def test_one_group_with_its_descriptions_and_those_inside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ls(["task/"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "task",
        "task/loss",
        "task/metrics",
    ]
    assert any(re.fullmatch("  none +No metrics beside the accuracies.", line) for line in lines)


def test_a_file_of_the_users_is_listed_with_its_place(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ls(["experiment", "--config-dir", "conf"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[0] == "mine")
    assert line.endswith("What I am after. (conf/experiment/mine.yaml)")
    assert any(line.split()[0] == "resnet18" for line in lines)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["modle"], "no group 'modle'; did you mean model?", id="misspelt"),
        pytest.param(["xyz"], "groups: callbacks, data", id="nothing near"),
        pytest.param(["-cd", "nowhere"], "there is no folder nowhere", id="folder"),
        pytest.param(["a", "b"], "unrecognized arguments: b", id="two groups"),
    ],
)
def test_what_ls_cannot_list(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        ls(argv)


def test_a_copy_is_the_file_and_can_be_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cp(["experiment/resnet18", "conf/experiment/mine.yaml"]) == 0
    copy = tmp_path / "conf/experiment/mine.yaml"
    shipped = (CONF / "experiment/resnet18.yaml").read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == shipped
    assert "train --config-dir conf experiment=mine\n" in capsys.readouterr().out
    assert compose(["--config-dir", "conf", "experiment=mine"]).config["name"] == "resnet18"


def test_a_copy_into_a_folder_keeps_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cp(["task/loss/cross_entropy.yaml", f"{tmp_path}/a/b/"])
    assert (tmp_path / "a/b/cross_entropy.yaml").exists()
    assert "use it with" not in capsys.readouterr().out  # no group of that name: not to be picked


def test_a_copy_of_the_users_own(mine: Path) -> None:
    cp(["experiment/mine", "other.yaml", "--config-dir", "conf"])
    assert Path("other.yaml").read_text() == mine.read_text()


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        pytest.param("experiment/resnet18", "conf/experiment/mine.yaml", "exists", id="exists"),
        pytest.param(
            "task/loss/cross_entropy",
            "conf/experiment/mine.yaml/a.yaml",
            "mine.yaml exists",
            id="file as folder",
        ),
        pytest.param("experiment/resnet18", "conf/experiment/mine", "ends in .yaml", id="no yaml"),
        pytest.param(
            "experiment/resnet81", "a.yaml", "did you mean experiment/resnet18", id="near"
        ),
        pytest.param("resnet18", "a.yaml", "name group/choice", id="no group"),
        pytest.param("strategy/zzzzzzzzzzzz", "a.yaml", "has ddp, dp", id="choices"),
    ],
)
def test_what_cp_refuses(mine: Path, source: str, target: str, expected: str) -> None:
    before = mine.read_text()
    with pytest.raises(ConfigError, match=expected) as caught:
        cp([source, target])
    assert caught.value.exit_code == 2
    assert mine.read_text() == before
    assert [path.name for path in Path().rglob("*") if path.is_file()] == ["mine.yaml"]


def test_the_command_shows_the_folder_of_configs_from_anywhere(tmp_path: Path) -> None:
    use = shown_use(tmp_path / "conf/task/loss/mine.yaml", "task/loss/cross_entropy")
    assert use == ["train", "--config-dir", str(tmp_path / "conf"), "task/loss=mine"]


def test_the_umbrella_ends_with_their_exit_code(mine: Path) -> None:
    code = "from scripts.regimen import main; main()"
    argv = ["cp", "experiment/resnet18", str(mine)]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {mine} exists: choose another name\n"
