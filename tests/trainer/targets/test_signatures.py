"""Arguments held against signatures, before anything is built."""

import re
from typing import Any, Literal

import pytest
import torch
from torch import nn

from trainer.targets.signatures import bind_problems, may_hold

SGD = "torch.optim.SGD"
CONV = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3}


def problems(node: Any, **provided: Any) -> list[str]:
    return [str(problem) for problem in bind_problems(node, "k", **provided)]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param(
            {"_target_": SGD, "momentun": 1}, "k.momentun: .*did you mean momentum", id="near"
        ),
        pytest.param({"_target_": SGD, "zzz": 1}, "k.zzz: .*it takes lr, ", id="far"),
        pytest.param({"_target_": SGD, "lr": "abc"}, "k.lr: expected float.*got 'abc'", id="type"),
        pytest.param({"_target_": SGD, "lr": True}, "k.lr: expected float.*got True", id="bool"),
        pytest.param({"_target_": SGD, "params": []}, "k.params: is filled in", id="filled-in"),
        pytest.param(
            {"_target_": SGD, "lr": 1, 3: 4}, "k.3: cannot be the name", id="number-as-name"
        ),
        pytest.param(
            {"_target_": SGD, "_partial_": "x"}, "k._partial_: expected true", id="partial"
        ),
        pytest.param({"_target_": SGD, "_args_": 3}, "k._args_: expected a list", id="args"),
        pytest.param(
            {"_target_": SGD, "_partail_": True}, "k._partail_: .*no argument", id="special"
        ),
        pytest.param({"_target_": "os.system"}, "k._target_: .*not allowed", id="refused"),
        pytest.param({"_target_": 3}, "k._target_: 3 is not the dotted path", id="no-path"),
    ],
)
def test_a_mistake_is_named(node: dict[Any, Any], expected: str) -> None:
    found = problems(node, provided=("params",))
    assert [text for text in found if re.match(expected, text)], found


def test_what_is_missing_is_listed_each() -> None:
    found = problems({"_target_": "torch.nn.Conv2d", "kernel_size": 3})
    assert [text.split(":")[0] for text in found] == ["k.in_channels", "k.out_channels"]


def test_nothing_is_missing_from_a_partial() -> None:
    assert problems({"_target_": "torch.nn.Conv2d", "_partial_": True}) == []


def test_arguments_given_by_place_are_not_missing() -> None:
    assert problems({"_target_": "torch.nn.Linear", "_args_": [1, 2]}) == []
    assert problems({"_target_": "torch.nn.Linear", "out_features": 2}, positional=1) == []
    (found,) = problems({"_target_": "torch.nn.Linear", "in_features": 1, "_args_": [1, 2]})
    assert found.startswith("k.in_features: is filled in")


def test_nested_nodes_are_checked_where_they_stand() -> None:
    node = {"_target_": "torch.nn.Sequential", "_args_": [CONV, {**CONV, "strid": 2}]}
    assert problems(node)[0].startswith("k._args_.1.strid:")
    assert problems({"a": {"b": [{**CONV, "strid": 2}]}})[0].startswith("k.a.b.0.strid:")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"kernel_size": [3, 3]}, id="a-list-for-a-tuple"),
        pytest.param({"padding": "same"}, id="text-of-a-union"),
        pytest.param({"bias": False}, id="bool"),
        pytest.param({"dtype": None}, id="null-where-it-is-the-default"),
        pytest.param({"stride": "${total_steps}"}, id="filled-in-later"),
    ],
)
def test_what_binds(change: dict[str, Any]) -> None:
    assert problems({**CONV, **change}) == []


class Base:
    pass


@pytest.mark.parametrize(
    ("annotation", "value", "may"),
    [
        pytest.param(float, 1, True, id="int-for-float"),
        pytest.param(int, 1.5, False, id="float-for-int"),
        pytest.param(int | None, None, True, id="optional"),
        pytest.param(int, None, False, id="null-for-int"),
        pytest.param(str, 3, False, id="number-for-text"),
        pytest.param(list[int], 3, False, id="number-for-list"),
        pytest.param(tuple[int, int], [1, 2], True, id="list-for-tuple"),
        pytest.param(dict[str, int], [1], False, id="list-for-dict"),
        pytest.param(Literal["a", "b"], "a", True, id="choice"),
        pytest.param(Literal["a", "b"], "c", False, id="no-choice"),
        pytest.param(torch.Tensor, 3, False, id="number-for-tensor"),
        pytest.param(nn.Module, "relu", False, id="text-for-module"),
        pytest.param(nn.Module, {"_target_": "x"}, True, id="a-node-may-become-anything"),
        pytest.param(Base, "x", True, id="a-class-of-the-users"),
        pytest.param("Unknown", "x", True, id="text-annotation"),
        pytest.param(Any, None, True, id="any"),
    ],
)
def test_may_hold(annotation: Any, value: Any, may: bool) -> None:
    assert may_hold(annotation, value) is may


@pytest.mark.parametrize("name", ["checkpoint_path", "pretrained_cfg"])
def test_arguments_that_unpickle_are_refused(name: str) -> None:
    found = problems({"_target_": "models.timm_adapter.build", name: "evil.pth"})
    assert [text for text in found if text.startswith(f"k.{name}: not allowed")]
