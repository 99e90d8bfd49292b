"""Optimizer state goes by name: it arrives where it belongs, to the bit, or not at all."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from regimen.trainer.errors import CheckpointError
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from toys import differences, through_a_file

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.1}
LBFGS = {"_target_": "torch.optim.LBFGS"}
RULES = {"first": {"match": "^0"}, "last": {"match": "^2"}}
PAIR: dict[str, Any] = {
    "optimizers": {"a": {**SGD, "params": {"match": "^0"}}, "b": {**ADAM, "params": None}}
}


def network(width: int = 4, dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Linear(4, 4))
    return nn.Sequential(*parts[:layers]).to(dtype)


def trained(node: dict[str, Any], model: nn.Module, updates: int = 2) -> Optimizers:
    optimizers = build_optimizers(model, node)
    train(optimizers, model, updates)
    return optimizers


def train(optimizers: Optimizers, model: nn.Module, updates: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def closure() -> float:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(parameter)
        return 1.0

    for _ in range(updates):
        for optimizer in optimizers.optimizers.values():
            optimizer.step(closure)


def by_name(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    return {
        optimizers.names[p]: dict(values)
        for _, optimizer in optimizers.items()
        for p, values in optimizer.state.items()
    }


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(SGD, id="sgd"),
        pytest.param(ADAM, id="adam"),
        pytest.param({**ADAM, "amsgrad": True}, id="amsgrad"),
        pytest.param({"_target_": "torch.optim.Adagrad", "lr": 0.1}, id="adagrad"),
        pytest.param({"_target_": "torch.optim.NAdam", "lr": 0.1}, id="nadam"),
        pytest.param({"_target_": "torch.optim.ASGD", "lr": 0.1}, id="asgd"),
        pytest.param({"_target_": "torch.optim.Adafactor", "lr": 0.1}, id="adafactor"),
        pytest.param({**LBFGS, "max_iter": 2, "history_size": 3}, id="lbfgs"),
        pytest.param({**ADAM, "param_groups": RULES}, id="groups"),
        pytest.param(PAIR, id="pair"),
        pytest.param({"_target_": "timm.optim.Lamb", "lr": 0.1, "param_groups": RULES}, id="lamb"),
        pytest.param({"_target_": "timm.optim.Lion", "lr": 0.1}, id="lion"),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_been_cut(node: dict[str, Any]) -> None:
    if node.get("_target_", "").startswith("timm"):
        pytest.importorskip("timm")
    model = network()
    whole = trained(node, model)
    saved = whole.state_dict()
    assert differences(through_a_file(saved), saved) == []
    again = network()
    again.load_state_dict(model.state_dict())
    resumed = build_optimizers(again, node)
    assert resumed.load_state_dict(saved) == []  # which shares nothing with the first run
    train(whole, model, 3)
    train(resumed, again, 3)
    assert differences(by_name(resumed), by_name(whole)) == []
    assert differences(again.state_dict(), model.state_dict()) == []


def test_reordered_groups_and_parameters_of_one_shape_get_their_own_state() -> None:
    """torch itself goes by position, and would swap these in silence."""
    saved = trained({**ADAM, "param_groups": RULES}, network())
    turned = {name: RULES[name] for name in reversed(RULES)}
    other = build_optimizers(network(), {**ADAM, "param_groups": turned})
    assert [g.name for g in other.groups()] == ["last", "first"]
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert differences(by_name(other), by_name(saved)) == []
    model = network()
    saved = trained(SGD, model)
    backwards = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9)
    other = Optimizers.wrap(backwards, model)
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert differences(by_name(other), by_name(saved)) == []


def test_what_is_frozen_later_loses_its_state_and_what_is_released_begins_afresh() -> None:
    rules = {**SGD, "param_groups": RULES}
    frozen = {**SGD, "param_groups": {**RULES, "first": {"match": "^0", "frozen": True}}}
    for before, after, remark in (
        (rules, frozen, "frozen since the checkpoint, their state is dropped"),
        (frozen, rules, "unfrozen since the checkpoint, they begin without state"),
    ):
        saved, other = trained(before, network()), build_optimizers(network(), after)
        remarks = other.load_state_dict(through_a_file(saved.state_dict()))
        assert remarks == [f"{remark}: 0.weight, 0.bias"]
        kept = {name: state for name, state in by_name(saved).items() if name.startswith("2")}
        assert differences(by_name(other), kept) == []


def test_hyper_parameters_come_back_or_are_left_as_configured() -> None:
    saved = trained({**ADAM, "param_groups": RULES}, network())
    saved.groups()[0].options["lr"] = 0.5
    saved.groups()[1].options["betas"] = (0.1, 0.2)
    state = through_a_file(saved.state_dict())
    exact = build_optimizers(network(), {**ADAM, "param_groups": RULES})
    exact.load_state_dict(state)
    assert exact.learning_rates() == {"first": 0.5, "last": 0.1}
    assert exact.groups()[1].options["betas"] == (0.1, 0.2)
    new = build_optimizers(network(), {**ADAM, "lr": 0.3, "param_groups": RULES})
    new.load_state_dict(state, hyper_parameters=False)
    assert new.learning_rates() == {"first": 0.3, "last": 0.3}
    assert new.groups()[1].options["betas"] == (0.9, 0.999)
    assert differences(by_name(new), by_name(saved)) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # torch's own loading would cast a float32 average of a bfloat16 parameter to bfloat16.
        pytest.param(torch.bfloat16, torch.bfloat16, id="kept to the bit"),
        pytest.param(torch.float32, torch.float64, id="as the parameter's format"),
    ],
)
def test_formats_and_the_choice_of_a_kernel(before: torch.dtype, after: torch.dtype) -> None:
    saved = trained({**ADAM, "fused": True}, network(dtype=before))
    for state in saved.optimizers["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-4
    other = build_optimizers(network(dtype=after), ADAM)
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert before != after or differences(by_name(other), by_name(saved)) == []
    found = by_name(other)["0.weight"]
    kept = torch.float32 if before == after else after
    assert (found["exp_avg"].dtype, found["step"].dtype) == (kept, torch.float32)
    assert other.groups()[0].options["fused"] is None  # a matter of the machine
    train(other, network(dtype=after), 1)


def test_lbfgs_state_is_one_vector_in_order() -> None:
    saved, model = trained(LBFGS, network()), network()
    turned = torch.optim.LBFGS(reversed(list(model.parameters())))
    with pytest.raises(CheckpointError, match="are in another order"):
        Optimizers.wrap(turned, model).load_state_dict(saved.state_dict())


ADAM_GROUP, GROUP = r"group 'default' of 'optimizer' \(torch.optim.adam.Adam\)", "group 'default'"


@pytest.mark.parametrize(
    ("saved", "here", "models", "message"),
    [
        (SGD, ADAM, {}, rf"0.weight is in {ADAM_GROUP}, it was in .*sgd.SGD\) \(\+3 more"),
        (SGD, PAIR, {}, r"0.weight is in group 'a' of 'a' .* of 'optimizer' .*\(\+3"),
        (
            {**SGD, "param_groups": {"first": {"match": "^0"}}},
            {**SGD, "param_groups": {"first": {"match": "^0.weight"}}},
            {},
            f"parameter 0.bias is in {GROUP} of .* it was in group 'first'",
        ),
        (SGD, SGD, {"width": 5}, r"0.weight has shape \[5, 4\], it had \[4, 4\] \(\+2"),
        (SGD, SGD, {"layers": 4}, rf"3.weight \({GROUP} of .* is not in the checkpoint.*\+1"),
        (SGD, SGD, {"layers": 2}, r"2.weight .*of the checkpoint is not in this run"),
    ],
)
def test_another_arrangement_is_refused(
    saved: dict[str, Any], here: dict[str, Any], models: dict[str, int], message: str
) -> None:
    state = through_a_file(trained(saved, network()).state_dict())
    other = trained(here, network(**models))
    before = through_a_file(other.state_dict())
    with pytest.raises(CheckpointError, match=message) as caught:
        other.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert repr(other.state_dict()) == repr(before)  # nothing was touched


MISSING = [["groups"], ["type"], ["state"], ["groups", "default", "hyper_parameters"]]


@pytest.mark.parametrize(
    "path",
    [["frozen"], *(["optimizers", "optimizer", *more] for more in MISSING)],
    ids=".".join,
)
def test_a_malformed_state_is_refused(path: list[str]) -> None:
    optimizers = trained(SGD, network())
    state = through_a_file(optimizers.state_dict())
    before = repr(optimizers.state_dict())
    del functools.reduce(dict.__getitem__, path[:-1], state)[path[-1]]
    for broken in (state, state | {"optimizers": [1]}):
        with pytest.raises(CheckpointError, match="malformed"):
            optimizers.load_state_dict(broken)
    assert repr(optimizers.state_dict()) == before


def test_state_that_is_not_plain_cannot_be_saved() -> None:
    optimizers = trained(SGD, network())
    parameter = next(optimizers.parameters())
    optimizers.optimizers["optimizer"].state[parameter]["history"] = object()
    with pytest.raises(CheckpointError, match=r"keeps a builtins.object in its state"):
        optimizers.state_dict()
