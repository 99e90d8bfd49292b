"""What asks for information instead of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.composition.folders import CONF
from scripts.help import answer


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert answer(parse_arguments(list(argv)))
    return capsys.readouterr().out


def test_help_lists_every_group_with_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    words = set(text.replace(",", " ").replace(":", " ").split())
    groups = {path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")} - {"."}
    assert groups - {"experiment"} <= words
    assert {path.stem for path in CONF.rglob("*/*.yaml")} <= words


def test_help_says_what_each_experiment_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split(None, 1) for line in printed(capsys, "--help").splitlines()]
    described = {words[0] for words in lines if len(words) == 2}
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} <= described


def test_help_shows_the_users_folder_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# train experiment=mine\n# @package _global_\n# What I am after.\nname: mine\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert "What I am after." in printed(capsys, "--help", "--config-dir", str(tmp_path))


def test_help_of_a_group_shows_choices_and_keys_with_their_meanings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(printed(capsys, "--help", "optimizer").split())
    assert "optimizer=CHOICE:" in text
    assert "adamw AdamW: Adam with decoupled weight decay." in text
    assert "optimizer.betas=[0.9, 0.999] how long the averages of gradients" in text
    assert "optimizer.lr_decay=0.0 update t uses" in text  # of one choice alone
    assert "[adagrad]" in text
    assert "optimizer/param_groups=CHOICE:" in text
    assert "callbacks.ema" not in text


def test_help_of_a_section_is_that_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "--help", "trainer.precision", "loader").split())
    assert text.startswith("trainer.precision=fp32 bf16 and fp16 are autocast;")
    assert "one of fp32, tf32, bf16" in text
    assert "trainer.max_epochs" not in text
    assert "loader.batch_size" in text


@pytest.mark.parametrize(
    ("topic", "near"), [("optimiser", "optimizer"), ("trainer.precison", "trainer.precision")]
)
def test_help_of_what_does_not_exist_names_the_nearest(topic: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        answer(parse_arguments(["--help", topic]))


def test_help_needs_neither_torch_nor_hydras_composition() -> None:
    code = "import sys; from scripts.help import answer; from scripts.cli.arguments import *;"
    code += "answer(parse_arguments(['--help'])); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_a_run_is_not_answered() -> None:
    assert not answer(parse_arguments(["experiment=resnet18"]))


def test_the_config_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed(capsys, "--cfg", "job", "loader.batch_size=3")
    assert "batch_size: 3" in whole
    assert "${data.num_classes}" in whole


def test_the_config_of_a_job_resolved_and_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--cfg", "job", "--resolve", "-p", "model"]
    assert "num_classes: 10" in printed(capsys, *argv)
    assert printed(capsys, "--cfg", "job", "-p", "model.dropout", "model.dropout=0.25") == "0.25\n"


def test_the_config_is_printed_though_values_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "root: ???" in printed(capsys, "--cfg", "job", "data=image_folder")


def test_the_config_is_printed_before_its_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="lrr"):
        answer(parse_arguments(["--cfg", "job", "lrr=1"]))
    assert "lrr: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["--version"], "Hydra 1.3", id="version"),
        pytest.param(["--info", "defaults"], "optimizer/sgd", id="defaults"),
        pytest.param(["--info", "searchpath"], "conf", id="searchpath"),
        pytest.param(["--hydra-help"], "hydra", id="hydra-help"),
        pytest.param(["--cfg", "hydra", "-p", "hydra.job"], "name: train", id="hydra-config"),
    ],
)
def test_what_hydra_answers(
    argv: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert answer(parse_arguments(argv))
    assert expected in capfd.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--info", "nonsense"], id="unknown-topic"),
        pytest.param(["--shell-completion", "install=nonsense"], id="unknown-shell"),
        pytest.param(["--cfg", "hydra", "hydra.run.dir=x"], id="hydras-keys"),
    ],
)
def test_a_question_that_has_no_answer(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        answer(parse_arguments(argv))


def test_completion_knows_groups_and_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", "train optimizer=ada")
    monkeypatch.setenv("COMP_POINT", "19")
    assert "optimizer=adamw" in printed(capsys, "--shell-completion", "query=bash")
