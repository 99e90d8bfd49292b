"""A node: its arguments held against the signature, and what is built of it."""

import pickle
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from regimen.trainer.targets.allow_list import TargetError
from regimen.trainer.targets.instantiate import CheckedNode, instantiate, may_hold, nodes_in

SGD = "torch.optim.SGD"
LINEAR = "torch.nn.Linear"
SEQUENTIAL = "torch.nn.Sequential"
DROPOUT = "torch.nn.Dropout"
CONV2D = "torch.nn.Conv2d"
CONV = {
    "_target_": CONV2D,
    "in_channels": 1,
    "out_channels": 2,
    "kernel_size": 3,
}
PARAMS = {"provided": ("params",)}


@pytest.mark.parametrize(
    ("target", "arguments", "given", "expected"),
    [
        (SGD, {"momentun": 1}, PARAMS, ["momentun: .*did you mean momentum"]),
        (SGD, {"zzz": 1}, PARAMS, ["zzz: .*it takes lr, "]),
        (SGD, {"lr": "abc"}, PARAMS, ["lr: expected float.*got 'abc'"]),
        (SGD, {"params": []}, PARAMS, ["params: is filled in"]),
        (SGD, {3: 4}, PARAMS, ["3: cannot be the name"]),
        (SGD, {"_partial_": "x"}, PARAMS, ["_partial_: expected true"]),
        (SGD, {"_args_": 3}, PARAMS, ["_args_: expected a list"]),
        (SGD, {"_partail_": True}, PARAMS, ["_partail_: .*no argument"]),
        ("os.system", {}, {}, ["_target_: .*not allowed"]),
        (3, {}, {}, ["_target_: 3 is not the dotted path"]),
        (CONV2D, {"kernel_size": 3}, {}, ["in_channels:", "out_channels:"]),
        (CONV2D, {"_partial_": True}, {}, []),
        (CONV2D, {**CONV, "kernel_size": [3, 3]}, {}, []),  # a tuple
        (CONV2D, {**CONV, "padding": "same", "bias": False, "dtype": None}, {}, []),
        (CONV2D, {**CONV, "stride": "${total_steps}"}, {}, []),  # filled in later
        (LINEAR, {"_args_": [1, 2]}, {}, []),
        (LINEAR, {"out_features": 2}, {"positional": 1}, []),
        (LINEAR, {"in_features": 1, "_args_": [1, 2]}, {}, ["in_features: is filled in"]),
        (LINEAR, {"_args_": ["a", 2]}, {}, ["_args_.0: in_features: expected int"]),
        (DROPOUT, {"_args_": [0.1, True, 3]}, {}, [".*takes 2 arguments by position"]),
        # Nested nodes are checked where they stand.
        (SEQUENTIAL, {"_args_": [CONV, {**CONV, "strid": 2}]}, {}, ["_args_.1.strid:"]),
        (SEQUENTIAL, {"_args_": [{"b": [{**CONV, "strid": 2}]}]}, {}, ["_args_.0.b.0.strid:"]),
    ],
    ids=range(22),
)
def test_a_mistake_is_named_and_what_binds_passes(target, arguments, given, expected):
    node = {"_target_": target, **arguments}
    found = []
    for key, inner in nodes_in(node, "k"):
        options = given if inner is node else {}
        found += [str(problem) for problem in CheckedNode(inner, key, **options).problems]

    assert len(found) == len(expected), found
    for text, pattern in zip(found, expected, strict=True):
        assert re.match(rf"k\.{pattern}", text)


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
def test_what_an_annotation_may_hold(annotation, fits, never):
    for value in fits:
        assert may_hold(annotation, value)
    for value in never:
        assert not may_hold(annotation, value)


def test_nested_nodes_are_built():
    layer = {"_target_": LINEAR, "_args_": [2, 3]}
    first, second = instantiate({"_target_": SEQUENTIAL, "_args_": [layer, layer]})

    assert type(first) is nn.Linear
    assert type(second) is nn.Linear
    assert first is not second


def test_arguments_of_the_caller_win():
    layer = {"_target_": LINEAR, "_args_": [2, 3]}
    by_node = instantiate(layer)
    by_caller = instantiate(layer, 4, 5)

    assert by_node.out_features == 3
    assert by_caller.out_features == 5


def test_arguments_of_the_caller_arrive_untouched():
    parameter = nn.Parameter(torch.ones(1))
    node = {"_target_": SGD, "lr": 0.1}
    optimizer = instantiate(node, [{"params": [parameter], "name": "a"}], lr=0.5)

    (group,) = optimizer.param_groups

    assert group["lr"] == 0.5
    assert group["params"][0] is parameter
    assert node == {"_target_": SGD, "lr": 0.1}


def test_a_partial_is_a_callable_that_takes_the_rest():
    node = {"_target_": LINEAR, "_partial_": True, "bias": False}
    make = instantiate(node, in_features=2)
    three = make(out_features=3)
    four = make(out_features=4)

    assert three.weight.shape == (3, 2)
    assert four.bias is None

    copied = pickle.loads(pickle.dumps(instantiate(node)))
    assert copied.keywords == {"bias": False}


def test_nodes_arrive_as_they_are_where_that_is_asked_for():
    node = {"_target_": "torch.nn.ParameterDict", "_recursive_": False}
    inner = {"_target_": "torch.nn.Identity"}
    for given in ({"parameters": {"a": inner}}, {"_args_": [{"a": inner}]}):
        made = instantiate({**node, **given})
        assert made["a"] == inner


def test_texts_are_not_resolved_a_second_time():
    texts = ["${total_steps}", "a${oc.env:HOME}b", "\\${x}", "${", "\\\\${y}", {}]
    made = instantiate({"_target_": "torch.nn.ParameterDict", "parameters": {"a": texts}})

    assert made["a"] == texts
    assert type(made["a"]) is list
    assert type(made["a"][-1]) is dict


MISSING = {"_target_": "torchvision.datasets.ImageFolder", "root": "nowhere"}


@pytest.mark.parametrize(
    ("target", "given", "kind", "message"),
    [
        (DROPOUT, {"p": 7}, TargetError, "k: torch.nn.Dropout.*probability"),
        (DROPOUT, {"zz": 1}, TargetError, r"k\.zz: .*no argument"),
        (SEQUENTIAL, {"_args_": [{"_target_": DROPOUT, "p": 7}]}, TargetError, r"k\._args_\.0: "),
        # Other exceptions come through, and so does a fault in the user's own code.
        (MISSING["_target_"], MISSING, FileNotFoundError, ""),
        ("torch.utils.data.ConcatDataset", {"datasets": [MISSING]}, FileNotFoundError, ""),
        ("my_faulty.build", {}, TypeError, "unsupported operand"),
    ],
    ids=range(6),
)
def test_a_value_that_the_target_rejects_is_a_config_error(
    target, given, kind, message, tmp_path, monkeypatch
):
    (tmp_path / "my_faulty.py").write_text("def build():\n    return 1 + 'x'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    with pytest.raises(kind, match=f"^{message}"):
        instantiate({"_target_": target, **given}, _key_="k")

    sys.modules.pop("my_faulty", None)
