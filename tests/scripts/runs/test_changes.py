"""What counts as a difference between the configuration of a run and that of its resume."""

from typing import Any

import pytest

from conf.check import fill_defaults
from scripts.runs.changes import ABSENT, changes

RUN: dict[str, Any] = {
    "model": {"_target_": "models.mlp.MLP", "in_features": 4, "num_classes": 2},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "data": {},
    "callbacks": {},
    "transforms": {"train": {"affine": {"_target_": "torchvision.transforms.v2.RandomAffine"}}},
}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"model": {"activation": "relu"}}, id="argument"),
        pytest.param({"data": {"fold": None}}, id="null"),
        pytest.param({"data": {"views": {}}}, id="node"),
        pytest.param({"data": {"views": {"crops": [], "flip": {"each": None}}}}, id="nested-node"),
        pytest.param({"callbacks": {"pictures": None}}, id="null-callback"),
        pytest.param({"optimizer": {"param_groups": {"biases": None}}}, id="null-rule"),
        pytest.param({"optimizer": {"lr_scheduler": None}}, id="null-of-ours"),
        pytest.param({"optimizer": {"foreach": None}}, id="null-is-the-default"),
    ],
)
def test_what_is_new_and_empty_or_at_its_default_is_no_change(more: dict[str, Any]) -> None:
    later = fill_defaults(RUN | {k: RUN.get(k, {}) | v for k, v in more.items()})
    assert changes(RUN, later) == {}
    assert changes(later, fill_defaults(RUN)) == {}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        pytest.param({"model": {"activation": "gelu"}}, "model.activation", id="argument"),
        pytest.param({"model": {"hidden": []}}, "model.hidden", id="empty-argument"),
        pytest.param({"model": {"activation": None}}, "model.activation", id="null-argument"),
        pytest.param({"optimizer": {"momentum": None}}, "optimizer.momentum", id="null-number"),
        pytest.param({"data": {"views": {"crops": [1]}}}, "data.views", id="node"),
        pytest.param({"data": {"views": {"each": False}}}, "data.views", id="false"),
        pytest.param({"callbacks": {"mine": {"_target_": "m.C"}}}, "callbacks.mine", id="callback"),
    ],
)
def test_what_is_new_and_says_something_is_one(more: dict[str, Any], key: str) -> None:
    later = fill_defaults(RUN | {k: RUN.get(k, {}) | v for k, v in more.items()})
    ((_, new),) = next(iter(more.values())).items()
    assert changes(RUN, later) == {key: (ABSENT, new)}
    assert changes(later, fill_defaults(RUN)) == {key: (new, ABSENT)}


def test_the_order_of_transforms_is_a_difference() -> None:
    first = {"transforms": {"train": {"a": {}, "b": {}}}}
    second = {"transforms": {"train": {"b": {}, "a": {}}}}
    assert [*changes(first, fill_defaults(second))] == ["transforms.train (order)"]
