"""From a command line to a configuration."""

import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.version import VersionBase

from conf.check import parse
from conf.errors import ConfigError
from conf.yaml_file import dump
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import Composed, compose, config_text
from trainer.assembly.check import check_targets

EXPERIMENT = "# train experiment=mine\n# @package _global_\n"


def composed(*argv: str) -> Composed:
    return compose(list(argv))


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(argv))
    return str(caught.value)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a folder of the user's, with an experiment."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT + "name: mine\n")
    return tmp_path


def write(folder: Path, name: str, text: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def test_the_defaults_compose() -> None:
    config = composed().config
    assert config["name"] == "train"
    assert config["model"]["_target_"] == "models.small_cnn.SmallCNN"
    assert config["model"]["num_classes"] == config["data"]["num_classes"]


def test_a_choice_in_a_folder_beside_the_start_names_the_option(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine.parent, "conf/model/other.yaml", "_target_: mine.Net\n")
    monkeypatch.chdir(mine.parent)
    said = refused("model=other")
    assert "there is no model=other" in said
    assert "conf/model/other.yaml is read with --config-dir conf" in said


def test_an_experiment_comes_after_the_groups_and_before_the_command_line() -> None:
    found = composed("experiment=resnet18", "loader.batch_size=7")
    assert found.config["name"] == "resnet18"
    assert found.config["loader"]["batch_size"] == 7
    assert found.config["trainer"]["max_epochs"] != 10
    assert found.choices["model"] == "resnet18"
    assert found.overrides == ["experiment=resnet18", "loader.batch_size=7"]


def test_a_group_may_be_swapped_under_an_experiment() -> None:
    config = composed("experiment=resnet18", "model=mlp", "optimizer=adamw").config
    assert config["model"]["_target_"] == "models.mlp.MLP"
    assert "depth" not in config["model"]
    assert config["optimizer"]["_target_"] == "torch.optim.AdamW"


def test_what_depends_on_the_length_of_training_stays_open() -> None:
    config = composed("experiment=resnet18", "lr_scheduler=one_cycle").config
    assert config["lr_scheduler"]["total_steps"] == "${total_steps}"


OPEN = "model._target_=torchvision.models.resnet18"  # takes any argument


@pytest.mark.parametrize("form", ["experiment=mine", "+experiment=mine", "++experiment=mine"])
def test_a_group_is_picked_with_or_without_plus(mine: Path, form: str) -> None:
    assert composed("--config-dir", str(mine), form).config["name"] == "mine"


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        pytest.param(["model.dropout=0.5"], "dropout", 0.5, id="change"),
        pytest.param(["+model.dropout=0.5"], "dropout", 0.5, id="plus-on-what-exists"),
        pytest.param([OPEN, "+model.extra={a: [1, x]}"], "extra", {"a": [1, "x"]}, id="add"),
        pytest.param([OPEN, "model.extra=1"], "extra", 1, id="add-without-plus"),
        pytest.param(["model.widths=[1,2]"], "widths", [1, 2], id="list"),
        pytest.param(["model.widths.1=99"], "widths", [16, 99, 64], id="item"),
        pytest.param(["~model.dropout"], "dropout", None, id="delete"),
        pytest.param(["model.dropout=${seed}", "seed=3"], "dropout", 3, id="interpolation"),
        pytest.param(["model.activation='a, b=c'"], "activation", "a, b=c", id="quoted"),
    ],
)
def test_forms_of_values(overrides: list[str], key: str, value: object) -> None:
    assert composed(*overrides).config["model"].get(key) == value


def test_several_options_of_a_group() -> None:
    callbacks = composed("callbacks=[default,ema]").config["callbacks"]
    assert {"checkpoint", "ema"} <= set(callbacks)


def test_a_group_may_be_dropped() -> None:
    assert composed("lr_scheduler=null").config["lr_scheduler"] is None
    assert composed("~lr_scheduler").config["lr_scheduler"] is None


def test_options_may_stand_between_overrides(mine: Path) -> None:
    found = parse_arguments(["a=1", "-m", "b=2", "--config-dir", str(mine), "c=3"])
    assert found.overrides == ("a=1", "b=2", "c=3")
    assert found.multirun


def test_the_users_folder_comes_first(mine: Path) -> None:
    write(mine, "optimizer/sgd.yaml", "_target_: torch.optim.SGD\nlr: 0.5\n")
    found = composed("--config-dir", str(mine), "optimizer=sgd")
    assert found.config["optimizer"]["lr"] == 0.5
    assert found.config["loader"]["batch_size"] == 128


def test_a_stored_configuration_composes_to_itself(tmp_path: Path) -> None:
    config = composed("experiment=resnet18", "model.activation=gelu").config
    stored = {**config, "run_dir": None, "resume": None, "dry_run": None}
    (tmp_path / "config.yaml").write_text(dump(stored))
    again = composed("--config-dir", str(tmp_path), "--config-name", "config").config
    assert again == stored


def test_group_files_may_leave_our_keys_out(mine: Path) -> None:
    write(mine, "trainer/short.yaml", "# train trainer=short\nmax_epochs: 1\n")
    trainer = composed("--config-dir", str(mine), "trainer=short").config["trainer"]
    assert (trainer["max_epochs"], trainer["precision"]) == (1, "fp32")


def test_where_a_key_was_written(mine: Path) -> None:
    write(mine, "experiment/mine.yaml", EXPERIMENT + "loader:\n  batch_size: 3\n")
    origin = composed("--config-dir", str(mine), "experiment=mine", "seed=3").origin
    assert origin("loader.batch_size") == f"{mine / 'experiment/mine.yaml'}:4"
    assert origin("seed") == "command line: seed=3"
    assert "conf/loader/default.yaml:" in (origin("loader.num_workers") or "")
    assert origin("nothing") is None


@pytest.mark.parametrize("option", ["../secret", "../../secret", "/tmp/secret", "a/../../secret"])
def test_a_choice_cannot_leave_the_folder(mine: Path, option: str) -> None:
    write(mine.parent, "secret.yaml", "_target_: models.mlp.MLP\n")
    write(mine, "secret.yaml", "_target_: models.mlp.MLP\n")
    message = refused("--config-dir", str(mine), f"model={option}")
    assert "there is no model=" in message or "not an override" in message


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--config-name", "../train"], id="outside"),
        pytest.param(["a=" + "[" * 5000], id="deep"),
        pytest.param(["a." * 300 + "b=1"], id="deep-key"),
        pytest.param(["a=" + "x" * 30_000], id="long"),
        pytest.param(["name=a\0b"], id="nul"),
    ],
)
def test_a_bad_command_line_is_answered_in_one_message(argv: list[str]) -> None:
    assert refused(*argv)


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys; from scripts.composition.compose import compose;"
    code += "compose(['experiment=resnet18']);"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no optimiser.*did you mean optimizer\?"):
        config_text(parse_arguments(["--cfg", "job", "-p", "optimiser"]))


def test_a_key_that_an_interpolation_reads_is_kept() -> None:
    line = ["experiment=resnet18", "+data.width=48", "+model.num_classes=${data.width}"]
    assert compose(line).config["data"]["width"] == 48


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
    text = "model: {_target_: models.mlp.MLP, dept: 2}\n"
    write(tmp_path, "experiment/mine.yaml", EXPERIMENT + text)
    model = compose(["--config-dir", str(tmp_path), "experiment=mine"]).config["model"]
    assert set(model) - {"in_channels", "num_classes", "image_size"} == {
        "_target_",
        "activation",
        "dept",
    }


def test_another_training_set_drops_the_splits_of_the_one_before(tmp_path: Path) -> None:
    mine = "{_target_: torchvision.datasets.FakeData, size: 8}"
    text = f"data:\n  train: {mine}\n  val: {mine}\n"
    write(tmp_path, "experiment/mine.yaml", EXPERIMENT + text)
    line = ["--config-dir", str(tmp_path), "experiment=mine"]
    data = compose(line).config["data"]
    assert (data["val"]["size"], data["test"]) == (8, None)
    data = compose([*line, "data.test._target_=data.sources.Digits", "data.test.split=test"]).config
    assert data["data"]["test"]["split"] == "test"
    alone = compose(["experiment=resnet18", f"data.train={mine}"]).config["data"]
    assert (alone["val"], alone["test"]) == (None, None)
    assert compose(["experiment=resnet18", "data.train.image_size=8"]).config["data"]["test"]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    write(tmp_path, "experiment/mine.yaml", f"\ufeff{EXPERIMENT}name: marked\r\n")
    assert composed("--config-dir", str(tmp_path), "experiment=mine").config["name"] == "marked"


def test_a_file_of_another_ending_is_named(tmp_path: Path) -> None:
    write(tmp_path, "experiment/short.yml", f"{EXPERIMENT}name: short\n")
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
