"""Optimizer state goes by name: it arrives where it belongs, to the bit, or not at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toys import differences, through_a_file
from trainer.errors import CheckpointError
from trainer.optimizers.optimizers import Optimizers, build_optimizers

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.1}
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
    for _ in range(updates):
        optimizers.zero_grad()
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter)
        for optimizer in optimizers.optimizers.values():
            optimizer.step()


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
        pytest.param({**ADAM, "param_groups": RULES}, id="groups"),
        pytest.param(PAIR, id="pair"),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_been_cut(node: dict[str, Any]) -> None:
    model = network()
    whole = trained(node, model)
    saved = through_a_file(whole.state_dict())
    again = network()
    again.load_state_dict(model.state_dict())
    resumed = build_optimizers(again, node)
    assert resumed.load_state_dict(saved) == []
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


def test_how_updates_are_computed_stays_a_matter_of_the_machine() -> None:
    saved = trained({**ADAM, "fused": True}, network())
    other = build_optimizers(network(), ADAM)
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert other.groups()[0].options["fused"] is None
    train(other, network(), 1)


def test_state_of_half_precision_parameters_keeps_its_bits() -> None:
    """torch's own loading would cast a float32 average of a bfloat16 parameter to bfloat16."""
    model = network(dtype=torch.bfloat16)
    saved = trained(ADAM, model)
    parameter = next(model.parameters())
    state = saved.optimizers["optimizer"].state[parameter]
    state["exp_avg"] = state["exp_avg"].float() + 1e-4
    other = build_optimizers(network(dtype=torch.bfloat16), ADAM)
    other.load_state_dict(through_a_file(saved.state_dict()))
    assert differences(by_name(other), by_name(saved)) == []
    assert by_name(other)["0.weight"]["exp_avg"].dtype == torch.float32


def test_state_follows_parameters_that_changed_their_format() -> None:
    saved = trained(ADAM, network())
    other = build_optimizers(network(dtype=torch.float64), ADAM)
    other.load_state_dict(through_a_file(saved.state_dict()))
    values = by_name(other)["0.weight"]
    assert values["exp_avg"].dtype == torch.float64
    assert values["step"].dtype == torch.float32


def test_loaded_state_is_not_shared_with_what_it_was_loaded_from() -> None:
    saved = trained(SGD, network())
    state = saved.state_dict()
    other = build_optimizers(network(), SGD)
    other.load_state_dict(state)
    buffer = by_name(other)["0.weight"]["momentum_buffer"]
    buffer.zero_()
    assert by_name(saved)["0.weight"]["momentum_buffer"].abs().sum() > 0


def test_lbfgs_is_saved_and_goes_on() -> None:
    def step(optimizers: Optimizers, model: nn.Module) -> None:
        def closure() -> Tensor:
            optimizers.zero_grad()
            loss = model(torch.eye(4)).square().sum()
            loss.backward()
            return torch.as_tensor(loss)

        for optimizer in optimizers.optimizers.values():
            optimizer.step(closure)  # type: ignore[arg-type]

    node = {"_target_": "torch.optim.LBFGS", "max_iter": 2, "history_size": 3}
    model, again = network(), network()
    whole, resumed = build_optimizers(model, node), build_optimizers(again, node)
    step(whole, model)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(whole.state_dict()))
    step(whole, model)
    step(resumed, again)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    turned = torch.optim.LBFGS(reversed(list(again.parameters())))
    with pytest.raises(CheckpointError, match="are in another order"):
        Optimizers.wrap(turned, again).load_state_dict(whole.state_dict())


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


@pytest.mark.parametrize(
    "path",
    [
        "optimizers",
        "frozen",
        "optimizers.optimizer.groups",
        "optimizers.optimizer.type",
        "optimizers.optimizer.state",
        "optimizers.optimizer.groups.default.hyper_parameters",
    ],
)
def test_a_malformed_state_is_refused(path: str) -> None:
    optimizers = trained(SGD, network())
    state = part = through_a_file(optimizers.state_dict())
    before = repr(optimizers.state_dict())
    *sections, last = path.split(".")
    for section in sections:
        part = part[section]
    del part[last]
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
