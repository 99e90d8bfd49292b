"""Completions of a command line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.completion import completion, completions

COMMANDS = ["train", "runs"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "net" / "now").mkdir(parents=True)
    (tmp_path / "runs" / "net" / "now" / "manifest.json").write_text("{}")
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "resnet_mine.yaml").write_text("")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("regimen tr", ["train"], id="command"),
        pytest.param("regimen ", COMMANDS, id="every command"),
        pytest.param("train mod", ["model="], id="group"),
        pytest.param("train model=resnet1", ["resnet18"], id="choice"),
        pytest.param("regimen train task/loss=cross", ["cross_entropy"], id="inner group"),
        pytest.param("train trainer.max_ep", ["trainer.max_epochs="], id="key"),
        pytest.param("train dry", ["dry_run="], id="key at the root"),
        pytest.param("evaluate run=", ["runs/net/now"], id="run"),
        pytest.param("train resume=runs/n", ["runs/net/now"], id="resume"),
        pytest.param("train -cd mine model=resnet_", ["resnet_mine"], id="the user's"),
        pytest.param("train nothing", [], id="nothing"),
    ],
)
def test_what_a_word_can_become(line: str, expected: list[str]) -> None:
    assert completions(line, COMMANDS) == expected


def test_the_name_of_a_run_is_no_command() -> None:
    place = Path("runs") / "a;touch b" / "now"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    assert "'runs/a;touch b/now'" in completions("evaluate run=", COMMANDS)


def test_every_group_and_key_is_offered_once() -> None:
    offered = completions("train ", COMMANDS)
    assert len(offered) == len(set(offered))
    assert {"experiment=", "model=", "seed=", "loader.batch_size=", "run="} <= set(offered)


def test_bash_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completion(["bash"])
    script = capsys.readouterr().out
    code = f"""{script}
    regimen() {{ '{sys.executable}' -P -m scripts.regimen "$@"; }}
    compopt() {{ :; }}
    COMP_LINE='train model=resnet' COMP_POINT=18
    _regimen_complete
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("resnet18 resnet34 resnet50\n", "")


def completed(shell: str, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    completion([shell, "--line", line])
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_whole_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(shell, "train model=resnet5", capsys) == "model=resnet50\n"
    assert completed(shell, "train trainer.max_ep", capsys) == "trainer.max_epochs=\n"
    assert completed(shell, "regimen ru", capsys) == "runs\n"


@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish here")
def test_fish_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completion(["fish"])
    code = f"""
    function regimen; '{sys.executable}' -P -m scripts.regimen $argv; end
    {capsys.readouterr().out}
    complete -C "train model=resnet"
    """
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["model=resnet18", "model=resnet34", "model=resnet50"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh here")
def test_zsh_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    completion(["zsh"])
    code = f"""
    regimen() {{ '{sys.executable}' -P -m scripts.regimen "$@" }}
    compdef() {{ :; }}
    compadd() {{ print -r -- "${{@[$@[(i)--]+1,-1]}}" }}
    {capsys.readouterr().out}
    words=(train model=resnet) CURRENT=2
    _regimen_complete
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["model=resnet18", "model=resnet34", "model=resnet50"]
