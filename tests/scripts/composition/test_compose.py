"""From a command line to a configuration."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.yaml_dump import dump
from scripts.cli.arguments import parse_arguments
from scripts.composition.argument_names import accepted
from scripts.composition.compose import Composed, compose

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
    origins = composed("--config-dir", str(mine), "experiment=mine", "seed=3").origins
    assert origins.of("loader.batch_size") == f"{mine / 'experiment/mine.yaml'}:4"
    assert origins.of("seed") == "command line: seed=3"
    assert "conf/loader/default.yaml:" in (origins.of("loader.num_workers") or "")
    assert origins.of("nothing") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("name: x\n", "must open with `# @package _global_`", id="no-package"),
        pytest.param(
            EXPERIMENT + "defaults:\n  - override /model: resnet19\n",
            "model/resnet19",
            id="unknown-group",
        ),
        pytest.param(
            EXPERIMENT + "defaults:\n  - override /modle: mlp\n", "modle", id="override-of-nothing"
        ),
        pytest.param(EXPERIMENT + "defaults:\n  - /../../secret\n", "secret", id="traversal"),
        pytest.param(EXPERIMENT + "name: x\nname: y\n", "mine.yaml:4", id="duplicate"),
        pytest.param(EXPERIMENT + "trainer:\n\tmax_epochs: 1\n", "mine.yaml:4", id="tab"),
        pytest.param(EXPERIMENT + "trainer: {max_epochs: 1\n", "mine.yaml:", id="unclosed"),
        pytest.param(EXPERIMENT + "trainer: {compile: no}\n", "read as false", id="no"),
        pytest.param(EXPERIMENT + "name: ${nowhere}\n", "refers to nothing", id="dead-end"),
        pytest.param(EXPERIMENT + "seed: ${trainer.max_epoch}\n", "max_epochs}?", id="near"),
        pytest.param(EXPERIMENT + "name: ${name}\n", "back to itself", id="loop"),
        pytest.param(EXPERIMENT + "- a\n", "keys and values", id="a-list"),
        pytest.param(b"\xff\xfe\x00", "UTF-8", id="bytes"),
        pytest.param(EXPERIMENT + "model:\n  zz: ???\n", "model.zz: missing", id="missing"),
    ],
)
def test_a_broken_experiment_is_named(mine: Path, text: str | bytes, expected: str) -> None:
    write(mine, "experiment/mine.yaml", text)
    assert expected in refused("--config-dir", str(mine), "experiment=mine")


HYDRA = {
    "callbacks": "hydra:\n  callbacks:\n    x: {_target_: pathlib.Path.touch, self: CANARY}\n",
    "environment": "hydra:\n  job:\n    env_set:\n      REGIMEN_CANARY: sings\n",
    "run-dir": "hydra:\n  run:\n    dir: CANARY\n",
    "search-path": "hydra:\n  searchpath:\n    - file://CANARY\n",
    "launcher": "defaults:\n  - override /hydra/launcher: basic\n",
    "launcher-here": "defaults:\n  - /hydra/launcher@_global_.hydra.launcher: basic\n",
    "logging": "hydra:\n  job_logging:\n    handlers:\n      x:\n        (): os.system\n",
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in HYDRA.items()])
def test_a_file_may_not_set_hydras_keys(mine: Path, text: str) -> None:
    canary = mine / "canary"
    write(mine, "experiment/mine.yaml", EXPERIMENT + text.replace("CANARY", str(canary)))
    message = refused("--config-dir", str(mine), "experiment=mine")
    assert "Hydra's own keys cannot be set" in message
    assert "mine.yaml" in message
    assert not canary.exists()
    assert "REGIMEN_CANARY" not in os.environ


def test_a_file_may_not_call_itself_part_of_hydra(mine: Path) -> None:
    write(mine, "experiment/mine.yaml", "# @package hydra.job\nenv_set: {A: b}\n")
    assert "Hydra's own keys" in refused("--config-dir", str(mine), "experiment=mine")


@pytest.mark.parametrize("option", ["../secret", "../../secret", "/tmp/secret", "a/../../secret"])
def test_a_choice_cannot_leave_the_folder(mine: Path, option: str) -> None:
    write(mine.parent, "secret.yaml", "_target_: models.mlp.MLP\n")
    write(mine, "secret.yaml", "_target_: models.mlp.MLP\n")
    message = refused("--config-dir", str(mine), f"model={option}")
    assert "there is no model=" in message or "not an override" in message


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--config-dir", "nowhere"], id="no-folder"),
        pytest.param(["--config-name", "trian"], id="no-primary"),
        pytest.param(["--config-name", "../train"], id="outside"),
        pytest.param(["--nonsense"], id="unknown-option"),
        pytest.param(["--experimental-rerun", "x.pickle"], id="what-would-unpickle"),
        pytest.param(["a=" + "[" * 5000], id="deep"),
        pytest.param(["a." * 300 + "b=1"], id="deep-key"),
        pytest.param(["a=" + "x" * 30_000], id="long"),
        pytest.param(["=1"], id="no-key"),
        pytest.param(["name=a\0b"], id="nul"),
        pytest.param(["seed.x=1"], id="below-a-value"),
        pytest.param(["model.widths.9=1"], id="beyond-a-list"),
    ],
)
def test_a_bad_command_line_is_answered_in_one_message(argv: list[str]) -> None:
    assert refused(*argv)


def test_alias_bombs_end_at_once(mine: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    write(mine, "experiment/mine.yaml", EXPERIMENT + "\n".join(lines))
    started = time.perf_counter()
    assert "aliases" in refused("--config-dir", str(mine), "experiment=mine")
    assert time.perf_counter() - started < 2


def test_interpolation_bombs_end_at_once() -> None:
    bomb = ",".join(f"k{i}:" + f"'{'${model.x.k' + str(i + 1) + '}'}'" for i in range(30))
    wide = bomb.replace("}'", "}" + "${model.dropout}" * 3 + "'")
    started = time.perf_counter()
    refused("+model.x={" + wide + ",k30:${model.x}}")
    assert time.perf_counter() - started < 2


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys; from scripts.composition.compose import compose;"
    code += "compose(['experiment=resnet18']);"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("override", "key"),
    [
        pytest.param("optimizer.lrr=1", "optimizer.lrr", id="torch's"),
        pytest.param("model.widht=3", "model.widht", id="ours"),
        pytest.param("+callbacks.checkpoint.foo=1", "callbacks.checkpoint.foo", id="nested"),
        pytest.param(
            "+transforms.train.affine.degree=1", "transforms.train.affine.degree", id="v2"
        ),
    ],
)
def test_a_wrong_argument_is_found_by_composing(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=resnet18", override])
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_name_that_is_bound_twice_is_left_to_the_signature(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "def one(a): ...\ndef two(a): ...\ntwo = print\nif one:\n    def three(a): ...\n"
    )
    sys.path.append(str(tmp_path))
    try:
        assert accepted("twice.one") == ("a",)
        assert accepted("twice.two") is None
        assert accepted("twice.three") is None
    finally:
        sys.path.remove(str(tmp_path))
