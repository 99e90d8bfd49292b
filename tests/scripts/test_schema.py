"""`regimen schema`: what an editor accepts in a YAML file is what a run accepts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from conf.errors import ConfigError
from scripts.composition.compose import compose
from scripts.composition.folders import CONF
from scripts.schema import schema, schema_text

FILES = sorted(CONF.rglob("*.yaml"))


@cache
def validator(group: str | None) -> Draft7Validator:
    found = json.loads(schema_text(group))
    Draft7Validator.check_schema(found)
    return Draft7Validator(found)


def mistakes(group: str | None, content: Any) -> list[str]:
    errors = validator(group).iter_errors(content)
    return [error.json_path for error in errors]


def named(path: Path) -> str:
    return path.relative_to(CONF).as_posix()


@pytest.mark.parametrize("path", [pytest.param(path, id=named(path)) for path in FILES])
def test_a_shipped_file_fits_its_schema(path: Path) -> None:
    place = path.parent.relative_to(CONF).as_posix()
    # train.yaml is a piece with any key of the root, as an experiment is.
    group = "experiment" if place == "." else place
    assert mistakes(group, yaml.safe_load(path.read_text(encoding="utf-8")) or {}) == []


@pytest.mark.parametrize("experiment", ["resnet18", "gan", "char_lm"])
def test_a_composed_configuration_fits(experiment: str) -> None:
    assert mistakes(None, compose([f"experiment={experiment}"]).config) == []


@pytest.mark.parametrize(
    ("group", "content", "place"),
    [
        pytest.param("trainer", {"max_epoch": 3}, "$", id="unknown key"),
        pytest.param("trainer", {"max_epochs": 0}, "$.max_epochs", id="limit"),
        pytest.param("trainer", {"precision": "bf17"}, "$.precision", id="choice"),
        pytest.param("loader", {"eval": {"workers": 1}}, "$.eval", id="section in a section"),
        pytest.param(
            "model", {"_target_": "models.resnet.ResNet", "dept": 18}, "$", id="argument of ours"
        ),
        pytest.param(
            "experiment", {"loader": {"batch_size": "many"}}, "$.loader.batch_size", id="experiment"
        ),
        pytest.param(
            "callbacks",
            {"ema": {"_target_": "callbacks.ema.EMA", "decy": 0.9}},
            "$.ema",
            id="named node",
        ),
        pytest.param("optimizer", {"lr": -1}, "$.lr", id="word of an open node"),
    ],
)
def test_a_mistake_is_marked(group: str, content: Any, place: str) -> None:
    assert mistakes(group, content) == [place]


@pytest.mark.parametrize(
    ("group", "content"),
    [
        pytest.param("trainer", {"max_epochs": "${mine.epochs}"}, id="interpolation"),
        pytest.param("model", {"_target_": "mine.Net", "anything": [1]}, id="the user's target"),
        pytest.param("data", {"num_classes": 3, "mine": 1}, id="key of an open section"),
        pytest.param("callbacks", {"tensorboard": None}, id="dropped"),
    ],
)
def test_what_a_run_takes_is_not_marked(group: str, content: Any) -> None:
    assert mistakes(group, content) == []


def test_the_command_prints_a_schema_or_writes_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schema(["task/loss"]) == 0
    assert json.loads(text := capsys.readouterr().out)["title"] == "task/loss"
    assert schema(["--write", str(tmp_path / "editor")]) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.json")}
    assert {"configuration.json", "experiment.json", "task.loss.json"} <= set(written)
    assert written["task.loss.json"] == text


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        schema(["optimiser"])
