"""`regimen schema`: what an editor accepts in a YAML file is what a run accepts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from conf.errors import ConfigError
from scripts.catalog.json_schema import (
    CONF,
    FOLDER,
    file_name,
    schema_files,
    schema_of,
    with_line,
)
from scripts.composition.compose import compose
from scripts.schema import schema

FILES = sorted(CONF.rglob("*.yaml"))


@cache
def validator(path: Path) -> Draft7Validator:
    found = json.loads(path.read_text(encoding="utf-8"))
    Draft7Validator.check_schema(found)
    return Draft7Validator(found)


def mistakes(group: str | None, content: Any) -> list[str]:
    errors = validator(FOLDER / file_name(group)).iter_errors(content)
    return [error.json_path for error in errors]


def named(path: Path) -> str:
    return path.relative_to(CONF).as_posix()


def test_the_shipped_schemas_are_fresh() -> None:
    files = schema_files()
    written = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    assert written == files, "python -m scripts.schema --write"


@pytest.mark.parametrize("path", [pytest.param(path, id=named(path)) for path in FILES])
def test_a_shipped_file_names_its_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert with_line(text, schema_of(path)) == text, "python -m scripts.schema --write"
    place = (path.parent / schema_of(path)).resolve()
    errors = validator(place).iter_errors(yaml.safe_load(text) or {})
    assert [(error.json_path, error.message) for error in errors] == []


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


def test_the_command_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema(["task/loss"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "task/loss"


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        schema(["optimiser"])
