"""Keys that nothing reads, and what is left of a target that was replaced."""

from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.composition.compose import compose


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        pytest.param("data.num_clases=7", "data.num_clases", "data.num_classes?", id="declared"),
        pytest.param("data.image_sise=32", "data.image_sise", "data.image_size?", id="of-the-file"),
        pytest.param("transforms.trian.x=5", "transforms.trian", "transforms.train?", id="section"),
        pytest.param("+data.foo=1", "data.foo", "nothing reads it; data has", id="far"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(override: str, key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=resnet18", override])
    (problem,) = caught.value.problems
    assert (problem.key, problem.message) == (key, "unknown key")
    assert hint in (problem.hint or "")
    assert problem.file == f"command line: {override}"


def test_a_key_that_an_interpolation_reads_is_kept() -> None:
    line = ["experiment=resnet18", "+data.width=48", "+model.num_classes=${data.width}"]
    assert compose(line).config["data"]["width"] == 48


def test_a_key_of_an_experiment_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nname: mine\ndata:\n  image_sise: 32\n")
    with pytest.raises(ConfigError, match=r"data\.image_sise: unknown key.*mine\.yaml:4"):
        compose(["--config-dir", str(tmp_path), "experiment=mine"])


def test_a_saved_configuration_keeps_keys_whose_readers_are_resolved(tmp_path: Path) -> None:
    saved = "name: saved\ndata:\n  image_size: 16\n"
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - train\n  - _self_\n{saved}")
    line = ["--config-dir", str(tmp_path), "--config-name", "config", "data.image_size=24"]
    assert compose(line).config["data"]["image_size"] == 24


@pytest.mark.parametrize(
    ("overrides", "key", "kept"),
    [
        pytest.param(
            ["optimizer._target_=torch.optim.SGD"],
            "optimizer",
            {"lr", "weight_decay", "param_groups"},
            id="those-that-both-take",
        ),
        pytest.param(
            ["task.loss._target_=torch.nn.MultiMarginLoss"], "task.loss", set(), id="nested"
        ),
        pytest.param(
            ["model={_target_: models.mlp.MLP, hidden: [3]}"],
            "model",
            {"num_classes", "in_channels", "image_size", "activation", "hidden"},
            id="given-with-it",
        ),
        pytest.param(
            ["task._target_=trainer.tasks.segmentation.Segmentation", "task/loss=weighted_sum"],
            "task",
            {"loss", "metrics", "num_classes"},
            id="chosen",
        ),
    ],
)
def test_a_replaced_target_takes_over_what_it_takes(
    overrides: list[str], key: str, kept: set[str]
) -> None:
    node = compose(["experiment=resnet18", *overrides]).config
    for name in key.split("."):
        node = node[name]
    assert node.keys() - {"_target_"} == kept


def test_an_inline_node_of_an_experiment_drops_what_the_default_group_brought(
    tmp_path: Path,
) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nname: mine\nmodel: {_target_: models.mlp.MLP, dept: 2}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "experiment=mine", "seed=x"])
    assert [problem.key for problem in caught.value.problems] == ["seed", "model.dept"]
