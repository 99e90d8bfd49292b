"""Defaults lists and files that Hydra refuses: the file, its line, and what to write instead."""

from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.version import VersionBase

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets

HEAD = "# @package _global_\n"


def refused(folder: Path, text: str, *more: str) -> str:
    """Return the error of `experiment=mine` with this text, as one of `folder`."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(folder), "experiment=mine", *more])
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "way_out"),
    [
        pytest.param("defaults:\n  - model: mlp\n", 3, "write `override /model: mlp`", id="bare"),
        pytest.param("defaults:\n  - /model: mlp\n", 3, "write `override /model: ", id="slash"),
        pytest.param("defaults:\n  - override /modell: mlp\n", 3, "did you mean model?", id="typo"),
        pytest.param(
            "defaults:\n  - override model: mlp\n", 3, "`override /model: ...`, with", id="no-slash"
        ),
        pytest.param("defaults:\n  - override /model: mlpp\n", 3, "did you mean mlp?", id="choice"),
        pytest.param("defaults:\n  - other: x\n", 3, "no experiment/other/x.yaml", id="nowhere"),
        pytest.param("callbacks:\n  - progress\n", 2, "callbacks: expected a section", id="list"),
        pytest.param("trainer.max_steps: 2\n", 2, "write trainer: {max_steps: ...}", id="dots"),
        pytest.param("null: 2\n", 2, "a key is null", id="null"),
        pytest.param("seed: ${trainer.max_steps\n", 2, "close its brace", id="brace"),
    ],
)
def test_a_mistake_is_one_line_with_its_file_and_the_way_out(
    tmp_path: Path, text: str, line: int, way_out: str
) -> None:
    message = refused(tmp_path, HEAD + text)
    assert way_out in message
    assert f"mine.yaml:{line}]" in message
    assert "\n" not in message


def test_lists_that_lead_back_to_themselves_are_named(tmp_path: Path) -> None:
    assert "own file" in refused(tmp_path, f"{HEAD}defaults: [mine]\n")
    (tmp_path / "experiment" / "other.yaml").write_text(f"{HEAD}defaults: [mine]\n")
    message = refused(tmp_path, f"{HEAD}defaults: [other]\n")
    assert "mine.yaml" in message
    assert "other.yaml" in message


def test_a_file_without_its_package_is_the_only_mistake(tmp_path: Path) -> None:
    message = refused(tmp_path, "defaults:\n  - override /model: mlp\ntrainer: {max_steps: 2}\n")
    assert message.startswith("must open with `# @package _global_`")
    assert "\n" not in message


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    marked = f"\ufeff{HEAD}name: marked\r\n".encode()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(marked)
    assert compose(["--config-dir", str(tmp_path), "experiment=mine"]).config["name"] == "marked"


def test_a_file_of_another_ending_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "short.yml").write_text(f"{HEAD}name: short\n")
    with pytest.raises(ConfigError, match=r"its file must be called short\.yaml"):
        compose(["--config-dir", str(tmp_path), "experiment=short"])


@pytest.mark.parametrize("rules", ["1.2", "1.3"])
def test_a_caller_that_uses_hydra_itself_changes_nothing_and_keeps_its_own(
    tmp_path: Path, rules: str
) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with initialize_config_dir(str(tmp_path), version_base=rules):
        test_a_file_of_another_ending_is_named(tmp_path)
        assert hydra.compose("config") == {"mine": 1}
        assert str(VersionBase.instance().version_base) == rules


def test_a_value_that_is_taken_from_another_key_names_the_override_that_gave_it() -> None:
    composed = compose(["experiment=resnet18", "data.split_seed=abc"])
    with pytest.raises(ConfigError) as caught, composed.locating():
        check_targets(parse(composed.config))
    assert {p.file for p in caught.value.problems} == {"command line: data.split_seed=abc"}
