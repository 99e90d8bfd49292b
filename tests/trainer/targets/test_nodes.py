"""A node: its arguments held against the signature, and what is built of it."""

import pickle
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from trainer.targets.allow_list import TargetError
from trainer.targets.instantiate import instantiate, may_hold, node_problems, nodes_in

SGD = "torch.optim.SGD"
CONV = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3}


def problems(node: Any, **provided: Any) -> list[str]:
    nodes = [(key, inner, provided if inner is node else {}) for key, inner in nodes_in(node, "k")]
    return [str(p) for key, inner, given in nodes for p in node_problems(inner, key, **given)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"momentun": 1}, "k.momentun: .*did you mean momentum"),
        ({"zzz": 1}, "k.zzz: .*it takes lr, "),
        ({"lr": "abc"}, "k.lr: expected float.*got 'abc'"),
        ({"lr": True}, "k.lr: expected float.*got True"),
        ({"params": []}, "k.params: is filled in"),
        ({"lr": 1, 3: 4}, "k.3: cannot be the name"),
        ({"_partial_": "x"}, "k._partial_: expected true"),
        ({"_args_": 3}, "k._args_: expected a list"),
        ({"_partail_": True}, "k._partail_: .*no argument"),
        ({"_target_": "os.system"}, "k._target_: .*not allowed"),
        ({"_target_": 3}, "k._target_: 3 is not the dotted path"),
    ],
    ids=range(11),
)
def test_a_mistake_is_named(arguments: dict[Any, Any], expected: str) -> None:
    found = problems({"_target_": SGD, **arguments}, provided=("params",))
    assert [text for text in found if re.match(expected, text)], found


def test_what_is_missing_is_listed_each_and_nothing_of_a_partial() -> None:
    found = problems({"_target_": "torch.nn.Conv2d", "kernel_size": 3})
    assert [text.split(":")[0] for text in found] == ["k.in_channels", "k.out_channels"]
    assert problems({"_target_": "torch.nn.Conv2d", "_partial_": True}) == []


def test_arguments_by_place_are_checked_as_what_they_stand_for() -> None:
    assert problems({"_target_": "torch.nn.Linear", "_args_": [1, 2]}) == []
    assert problems({"_target_": "torch.nn.Linear", "out_features": 2}, positional=1) == []
    (found,) = problems({"_target_": "torch.nn.Linear", "in_features": 1, "_args_": [1, 2]})
    assert found.startswith("k.in_features: is filled in")
    (found,) = problems({"_target_": "torch.nn.Linear", "_args_": ["a", 2]})
    assert found.startswith("k._args_.0: in_features: expected int")
    (found,) = problems({"_target_": "torch.nn.Dropout", "_args_": [0.1, True, 3]})
    assert "takes 2 arguments by position" in found


def test_nested_nodes_are_checked_where_they_stand() -> None:
    node = {"_target_": "torch.nn.Sequential", "_args_": [CONV, {**CONV, "strid": 2}]}
    assert problems(node)[0].startswith("k._args_.1.strid:")
    assert problems({"a": {"b": [{**CONV, "strid": 2}]}})[0].startswith("k.a.b.0.strid:")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kernel_size", [3, 3]),  # a tuple
        ("padding", "same"),
        ("bias", False),
        ("dtype", None),
        ("stride", "${total_steps}"),  # filled in later
    ],
)
def test_what_binds(argument: str, value: Any) -> None:
    assert problems({**CONV, argument: value}) == []


@pytest.mark.parametrize(
    ("annotation", "fits", "never"),
    [
        (float, [1, 0.5], [True, "1"]),
        (int, [1], [1.5, None, True]),
        (int | None, [None, 3], ["3"]),
        (str, ["x"], [3]),
        (list[int], [[1]], [3, ["a"]]),
        (tuple[int, int], [[1, 2]], [["a", 2]]),
        (dict[str, int], [{}], [[1]]),
        (Literal["a", "b"], ["a"], ["c"]),
        (torch.Tensor, [{"_target_": "x"}], [3]),
        (nn.Module, [{"_target_": "x"}], ["relu"]),  # a node may become anything
        (Path, ["x"], []),  # other classes are not compared
        ("Unknown", ["x"], []),
        (Any, [None, 3], []),
    ],
)
def test_what_an_annotation_may_hold(annotation: Any, fits: list[Any], never: list[Any]) -> None:
    assert all(may_hold(annotation, value) for value in fits)
    assert not any(may_hold(annotation, value) for value in never)


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
    assert (instantiate(node).out_features, instantiate(node, 4, 5).out_features) == (3, 5)


def test_a_partial_is_a_callable_that_takes_the_rest() -> None:
    node = {"_target_": "torch.nn.Linear", "_partial_": True, "bias": False}
    make = instantiate(node, in_features=2)
    assert make(out_features=3).weight.shape == (3, 2)
    assert make(out_features=4).bias is None
    assert pickle.loads(pickle.dumps(instantiate(node))).keywords == {"bias": False}


def test_nodes_within_stay_as_they_are_where_that_is_asked_for() -> None:
    inner = {"_target_": "torch.nn.Identity"}
    for given in ({"parameters": {"a": inner}}, {"_args_": [{"a": inner}]}):
        node = {"_target_": "torch.nn.ParameterDict", "_recursive_": False, **given}
        assert instantiate(node)["a"] == inner


@pytest.mark.parametrize("text", ["${total_steps}", "a${oc.env:HOME}b", "\\${x}", "${", "\\\\${y}"])
def test_text_is_not_resolved_a_second_time_and_containers_arrive_plain(text: str) -> None:
    made = instantiate({"_target_": "torch.nn.ParameterDict", "parameters": {"a": [text, {}]}})
    assert made["a"] == [text, {}]
    assert [type(made["a"]), type(made["a"][1])] == [list, dict]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": SGD, "lr": -1}, "k: torch.optim.SGD.*Invalid learning rate"),
        ({"_target_": SGD, "zz": 1}, "k.zz: .*no argument"),
    ],
)
def test_a_value_that_the_target_rejects_is_a_config_error(node: Any, message: str) -> None:
    with pytest.raises(TargetError, match=f"^{message}"):
        instantiate(node, [nn.Parameter(torch.ones(1))], _key_="k")
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
