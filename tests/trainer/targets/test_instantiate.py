"""From a node to an object."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.targets.allow_list import TargetError
from trainer.targets.instantiate import instantiate


def test_nested_nodes_are_built_first() -> None:
    layer = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    model = instantiate({"_target_": "torch.nn.Sequential", "_args_": [layer, layer]})
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
    assert model[0] is not model[1]


def test_arguments_of_the_caller_win_and_arrive_untouched() -> None:
    parameters = [{"params": [nn.Parameter(torch.ones(1))], "name": "a"}]
    node = {"_target_": "torch.optim.SGD", "lr": 0.1}
    optimizer = instantiate(node, parameters, lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["params"][0] is parameters[0]["params"][0]
    assert node == {"_target_": "torch.optim.SGD", "lr": 0.1}


def test_positional_arguments_take_the_place_of_the_nodes() -> None:
    node = {"_target_": "torch.nn.Linear", "_args_": [2, 3]}
    assert instantiate(node).out_features == 3
    assert instantiate(node, 4, 5).out_features == 5


def test_a_partial_is_a_callable_that_takes_the_rest() -> None:
    node = {"_target_": "torch.nn.Linear", "_partial_": True, "bias": False}
    make = instantiate(node, in_features=2)
    assert make(out_features=3).weight.shape == (3, 2)
    assert make(out_features=4).bias is None
    assert pickle.loads(pickle.dumps(instantiate(node))).keywords == {"bias": False}


def test_nodes_within_stay_as_they_are_where_that_is_asked_for() -> None:
    inner = {"_target_": "torch.nn.Identity"}
    node = {"_target_": "torch.nn.ParameterDict", "parameters": {"a": inner}, "_recursive_": False}
    assert instantiate(node)["a"] == inner


def test_containers_arrive_plain() -> None:
    node = {"_target_": "torch.nn.ParameterDict", "parameters": {"a": [1, {"b": 2}]}}
    made = instantiate(node)
    assert type(made["a"]) is list
    assert type(made["a"][1]) is dict


@pytest.mark.parametrize("text", ["${total_steps}", "a${oc.env:HOME}b", "\\${x}", "${", "\\\\${y}"])
def test_text_is_not_resolved_a_second_time(text: str) -> None:
    made = instantiate({"_target_": "torch.nn.ParameterDict", "parameters": {"a": text}})
    assert made["a"] == text


@pytest.mark.parametrize(
    ("node", "text"),
    [
        pytest.param(
            {"_target_": "torch.optim.SGD", "lr": -1}, "Invalid learning rate", id="value"
        ),
        pytest.param({"_target_": "torch.optim.SGD", "zz": 1}, "zz", id="unknown-argument"),
    ],
)
def test_a_value_that_the_target_rejects_is_a_config_error(node: dict[str, Any], text: str) -> None:
    with pytest.raises(TargetError, match=r"^optimizer: torch\.optim\.SGD") as caught:
        instantiate(node, [nn.Parameter(torch.ones(1))], _key_="optimizer")
    assert text in str(caught.value)


def test_a_nested_target_that_rejects_is_a_config_error() -> None:
    inner = {"_target_": "torch.nn.Dropout", "p": 7}
    with pytest.raises(TargetError, match=r"^model\._args_\.0: .*probability"):
        instantiate({"_target_": "torch.nn.Sequential", "_args_": [inner]}, _key_="model")


def test_other_exceptions_come_through(tmp_path: Path) -> None:
    missing = {"_target_": "torchvision.datasets.ImageFolder", "root": str(tmp_path / "none")}
    with pytest.raises(FileNotFoundError):
        instantiate(missing)
    with pytest.raises(FileNotFoundError):
        instantiate({"_target_": "torch.utils.data.ConcatDataset", "datasets": [missing]})


def test_a_fault_in_the_users_own_code_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_faulty.py").write_text("def build():\n    return 1 + 'x'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TypeError, match="unsupported operand"):
        instantiate({"_target_": "my_faulty.build"})
    monkeypatch.delitem(sys.modules, "my_faulty")
