import copy
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

from callbacks.ema import RunningAverage


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def disturb(model: nn.Module) -> None:
    """Change parameters and BatchNorm's statistics, as an update does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.train()(torch.randn(5, 3, dtype=torch.float64))


# The fourth, swa with buffers, torch 2.15 cannot: it divides BatchNorm's integer count.
@pytest.mark.parametrize(("kind", "use_buffers"), [("ema", True), ("ema", False), ("swa", False)])
def test_equals_torchs_averaged_model(kind: str, use_buffers: bool) -> None:
    model = make_model()
    # get_swa_multi_avg_fn divides in float32, whatever the weights are.
    rule = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
    theirs = AveragedModel(
        model, avg_fn=None if rule else get_swa_avg_fn(), use_buffers=use_buffers, **rule
    )
    theirs.update_parameters(model)  # torch's first call copies, where ours begins
    ours = RunningAverage(use_buffers=use_buffers)
    ours.begin(model)
    for count in range(1, 6):
        disturb(model)
        theirs.update_parameters(model)
        ours.update(get_ema_multi_avg_fn(0.9) if kind == "ema" else get_swa_multi_avg_fn(), count)
    averaged = ours.tensors()
    for name, value in theirs.module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert averaged[name] == 5  # a count is no average: ours is the model's
        else:
            torch.testing.assert_close(averaged[name], value, rtol=1e-14, atol=1e-14)


def test_exchange_gives_values_and_keeps_tensors() -> None:
    model = make_model()
    average = RunningAverage()
    average.begin(model)
    start = copy.deepcopy(model.state_dict())
    disturb(model)
    trained = copy.deepcopy(model.state_dict())
    tensors = {name: id(p) for name, p in model.named_parameters()}
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}

    def same(expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())

    with suppress(RuntimeError), average.exchanged(model):
        assert same(start)
        raise RuntimeError("in between")
    assert same(trained)
    assert {name: id(p) for name, p in model.named_parameters()} == tensors
    assert {n: v.data_ptr() for n, v in model.state_dict().items()} == addresses
    assert all(torch.equal(average.tensors()[n], start[n]) for n in start)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_tied_weights_move_once_and_keep_both_names() -> None:
    model = Tied()
    average = RunningAverage()
    average.begin(model)
    with torch.no_grad():
        model.first.weight.zero_()
    start = average.tensors()["first.weight"].clone()
    average.update(get_ema_multi_avg_fn(1 - 0.5))
    state = average.tensors()
    assert state.keys() == {"first.weight", "second.weight"}
    assert torch.equal(state["first.weight"], start / 2)
    loaded = RunningAverage()
    loaded.load_state_dict({"model": {name: value.clone() for name, value in state.items()}})
    loaded.begin(model)
    loaded.update(get_ema_multi_avg_fn(1 - 0.5))
    assert torch.equal(loaded.tensors()["second.weight"], start / 4)


def test_a_loaded_average_is_used_with_or_without_beginning() -> None:
    model, source = make_model(), RunningAverage()
    source.begin(model)
    loaded, under_way = RunningAverage(), RunningAverage()
    disturb(model)
    under_way.begin(model)
    for target in (loaded, under_way):
        target.load_state_dict(source.state_dict())
        with target.exchanged(model):
            assert torch.equal(model.state_dict()["0.weight"], source.tensors()["0.weight"])


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_averaged_in_its_parts() -> None:
    plain, sharded = make_model(), make_model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    averages = [RunningAverage(), RunningAverage()]
    for average, model in zip(averages, (plain, sharded), strict=True):
        average.begin(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        average.update(get_ema_multi_avg_fn(1 - 0.25))
        average.update(get_ema_multi_avg_fn(0.5))
    expected, found = (average.tensors() for average in averages)
    assert hasattr(found["0.weight"], "full_tensor")
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    loaded = RunningAverage()
    loaded.load_state_dict({"model": expected})
    with loaded.exchanged(sharded):
        assert torch.equal(sharded[0].weight.full_tensor(), expected["0.weight"])
