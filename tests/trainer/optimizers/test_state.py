"""Optimizer state goes by name: it arrives where it belongs, to the bit, or not at all."""

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
    parts = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Linear(4, 4)]
    return nn.Sequential(*parts[:layers]).to(dtype)


def trained(node: dict[str, Any], model: nn.Module, updates: int = 2) -> Optimizers:
    optimizers = build_optimizers(model, node)
    train(optimizers, model, updates)
    return optimizers


def train(optimizers: Optimizers, model: nn.Module, updates: int) -> None:
    """Update with random gradients."""
    generator = torch.Generator().manual_seed(1)

    def closure() -> float:
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter)
        return 1.0

    for _ in range(updates):
        for optimizer in optimizers.optimizers.values():
            optimizer.step(closure)


def by_name(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter."""
    found = {}
    for optimizer in optimizers.optimizers.values():
        for parameter, values in optimizer.state.items():
            found[optimizers.names[parameter]] = dict(values)
    return found


def saved_by(optimizers: Optimizers) -> Any:
    return through_a_file(optimizers.state_dict())


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
    remarks = resumed.load_state_dict(saved)  # which shares nothing with the first run

    assert remarks == []

    train(whole, model, 3)
    train(resumed, again, 3)
    assert differences(by_name(resumed), by_name(whole)) == []
    assert differences(again.state_dict(), model.state_dict()) == []


def test_reordered_groups_get_their_own_state() -> None:
    """torch itself goes by position, and would swap these in silence."""
    saved = trained({**ADAM, "param_groups": RULES}, network())
    turned = {name: RULES[name] for name in reversed(RULES)}
    other = build_optimizers(network(), {**ADAM, "param_groups": turned})

    assert [group.name for group in other.groups()] == ["last", "first"]

    other.load_state_dict(saved_by(saved))
    assert differences(by_name(other), by_name(saved)) == []


def test_reordered_parameters_of_one_shape_get_their_own_state() -> None:
    model = network()
    saved = trained(SGD, model)
    backwards = list(reversed(list(model.parameters())))
    other = Optimizers.wrap(torch.optim.SGD(backwards, lr=0.1, momentum=0.9), model)
    other.load_state_dict(saved_by(saved))

    assert differences(by_name(other), by_name(saved)) == []


TRAINED = {**SGD, "param_groups": RULES}
FROZEN = {**SGD, "param_groups": {**RULES, "first": {"match": "^0", "frozen": True}}}


@pytest.mark.parametrize(
    ("before", "after", "remark"),
    [
        pytest.param(
            TRAINED, FROZEN, "frozen since the checkpoint, their state is dropped", id="frozen"
        ),
        pytest.param(
            FROZEN,
            TRAINED,
            "unfrozen since the checkpoint, they begin without state",
            id="released",
        ),
    ],
)
def test_what_is_frozen_later_loses_its_state_and_what_is_released_begins_afresh(
    before: dict[str, Any], after: dict[str, Any], remark: str
) -> None:
    saved = trained(before, network())
    other = build_optimizers(network(), after)
    remarks = other.load_state_dict(saved_by(saved))
    kept = {name: state for name, state in by_name(saved).items() if name.startswith("2")}

    assert remarks == [f"{remark}: 0.weight, 0.bias"]
    assert differences(by_name(other), kept) == []


def test_hyper_parameters_come_back_or_are_left_as_configured() -> None:
    saved = trained({**ADAM, "param_groups": RULES}, network())
    first, last = saved.groups()
    first.options["lr"] = 0.5
    last.options["betas"] = (0.1, 0.2)
    state = saved_by(saved)

    exact = build_optimizers(network(), {**ADAM, "param_groups": RULES})
    exact.load_state_dict(state)
    _, last = exact.groups()

    assert exact.learning_rates() == {"first": 0.5, "last": 0.1}
    assert last.options["betas"] == (0.1, 0.2)

    new = build_optimizers(network(), {**ADAM, "lr": 0.3, "param_groups": RULES})
    new.load_state_dict(state, hyper_parameters=False)
    _, last = new.groups()

    assert new.learning_rates() == {"first": 0.3, "last": 0.3}
    assert last.options["betas"] == (0.9, 0.999)
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
    other.load_state_dict(saved_by(saved))

    found = by_name(other)["0.weight"]
    if before == after:
        assert differences(by_name(other), by_name(saved)) == []
        assert found["exp_avg"].dtype == torch.float32
    else:
        assert found["exp_avg"].dtype == after

    assert found["step"].dtype == torch.float32

    (group,) = other.groups()
    assert group.options["fused"] is None  # a matter of the machine

    train(other, network(dtype=after), 1)


def test_lbfgs_state_is_one_vector_in_order() -> None:
    saved = trained(LBFGS, network())
    model = network()
    backwards = list(reversed(list(model.parameters())))
    other = Optimizers.wrap(torch.optim.LBFGS(backwards), model)

    with pytest.raises(CheckpointError, match="are in another order"):
        other.load_state_dict(saved.state_dict())


ADAM_GROUP = r"group 'default' of 'optimizer' \(torch.optim.adam.Adam\)"
GROUP = "group 'default'"


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
    state = saved_by(trained(saved, network()))
    other = trained(here, network(**models))
    before = saved_by(other)

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
    before = repr(optimizers.state_dict())
    state = saved_by(optimizers)
    *keys, last = path
    part = state
    for key in keys:
        part = part[key]
    del part[last]

    with pytest.raises(CheckpointError, match="malformed"):
        optimizers.load_state_dict(state)
    with pytest.raises(CheckpointError, match="malformed"):
        optimizers.load_state_dict({**state, "optimizers": [1]})
    assert repr(optimizers.state_dict()) == before


def test_state_that_is_not_plain_cannot_be_saved() -> None:
    optimizers = trained(SGD, network())
    parameter = next(optimizers.parameters())
    optimizers.optimizers["optimizer"].state[parameter]["history"] = object()
    with pytest.raises(CheckpointError, match=r"keeps a builtins.object in its state"):
        optimizers.state_dict()
