"""`data.shared`: the arguments that all data sets have, written once."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets

ALL = """
shared: {_target_: regimen.data.tabular.Diabetes, split_seed: "${data.split_seed}"}
split_seed: 3
num_classes: 1
image_size: 1
channels: 10
train: {split: train}
val: {split: val, split_seed: 5}
test: {split: test}
"""


def composed(folder: Path, data: str, *overrides: str) -> dict[str, Any]:
    file = folder / "conf" / "data" / "ours.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# train data=ours{textwrap.dedent(data)}")
    line = ["--config-dir", str(folder / "conf"), "experiment=regression", "data=ours", *overrides]
    composition = compose(line)
    with composition.locating():
        config = parse(composition.config)
        check_targets(config)
    return composition.config["data"]


def test_each_set_has_what_is_shared_but_for_its_own(tmp_path: Path) -> None:
    data = composed(tmp_path, ALL)
    diabetes = {"_target_": "regimen.data.tabular.Diabetes"}
    assert data["train"] == {**diabetes, "split": "train", "split_seed": 3}
    assert data["val"] == {**diabetes, "split": "val", "split_seed": 5}
    assert data["test"] == {**diabetes, "split": "test", "split_seed": 3}
    assert data.get("predict") is None
    assert not data.get("shared")


def test_the_command_line_sets_one_or_all(tmp_path: Path) -> None:
    data = composed(tmp_path, ALL, "data.train.split_seed=7", "data.shared.split_seed=9")
    assert [data[s]["split_seed"] for s in ("train", "val", "test")] == [7, 5, 9]


def test_sets_by_name_have_it_too(tmp_path: Path) -> None:
    data = composed(tmp_path, ALL, "data.val=null", "+data.val={a: {split: val}, b: {split: test}}")
    assert {name: node["split_seed"] for name, node in data["val"].items()} == {"a": 3, "b": 3}


def test_a_mistake_in_it_is_told_where_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.sed: .*ours\.yaml:2"):
        composed(tmp_path, ALL.replace("split_seed:", "sed:", 1))


def test_a_configuration_that_is_not_composed_may_not_have_it(tmp_path: Path) -> None:
    config = compose(["experiment=regression"]).config
    config["data"]["shared"] = {"split_seed": 1}
    with pytest.raises(ConfigError, match=r"data\.shared: is merged"):
        parse(config)
