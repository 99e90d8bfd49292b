"""The summary's figures against counts by hand, and that looking changes nothing."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.resnet import ResNet
from models.vit import ViT
from trainer.assembly.summary import estimate, render, state_bytes, summarize


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


class Host(nn.Module):
    """Makes a tensor on the CPU inside: it runs for real or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4) + random.random()
        if bool((noise > 5).any()):
            return x
        self.calls = noise
        out: Tensor = self.norm(self.linear(x) + noise)
        return out


def test_figures_of_an_mlp_by_hand() -> None:
    summary = summarize(mlp(), torch.zeros(4, 32))
    assert summary.rows[0].parameters == 32 * 16 + 16 + 16 * 10 + 10
    assert summary.flops == 2 * (32 * 16 + 16 * 10)
    # The input exists anyway; the ReLU's output is what it and the second layer both keep.
    assert summary.activation_bytes == 16 * 4
    assert [(r.name, r.output) for r in summary.rows[:3]] == [
        ("", "N x 10"), ("0", "N x 16"), ("1", "N x 16")
    ]  # fmt: skip
    assert summary.rows[3].flops == 2 * 16 * 10


def test_the_loss_counts_in_when_the_call_computes_it() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    batch = (torch.zeros(4, 32), torch.zeros(4, dtype=torch.long))
    with_loss = summarize(mlp(), batch, call=step).activation_bytes
    without = summarize(mlp(), batch[0]).activation_bytes
    assert with_loss is not None
    assert without is not None
    assert with_loss - without >= 10 * 4  # the log-probabilities


@pytest.mark.parametrize(
    ("model", "example"),
    [
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), (8, 4), id="meta"
        ),
        pytest.param(Host(), (8, 4), id="real"),
    ],
)
@pytest.mark.parametrize("compute", [False, True])
def test_looking_changes_nothing(model: nn.Module, example: tuple[int, ...], compute: bool) -> None:
    model.train()
    next(model.children()).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    x = torch.randn(example)
    numbers, python = torch.get_rng_state(), random.getstate()
    summary = summarize(model, x, compute=compute)
    assert summary.problem is None
    assert summary.flops == 2 * 4 * 4
    assert torch.equal(numbers, torch.get_rng_state())
    assert python == random.getstate()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert not hasattr(model, "calls")
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


@pytest.mark.parametrize(
    ("model", "example"),
    [
        pytest.param(mlp(), (4, 32), id="mlp"),
        pytest.param(ResNet(18, 10, in_channels=1, stem="cifar"), (2, 1, 16, 16), id="resnet"),
        pytest.param(ViT(10, depth=2, dim=24), (2, 1, 16, 16), id="attention"),
        pytest.param(Recurrent(), (2, 5, 4), id="recurrent"),
    ],
)
def test_computing_finds_what_the_meta_device_finds(
    model: nn.Module, example: tuple[int, ...]
) -> None:
    meta, computed = (summarize(model, torch.randn(example), compute=c) for c in (False, True))
    assert computed.flops == meta.flops
    assert computed.rows == meta.rows


@pytest.mark.parametrize("compute", [False, True])
def test_a_forward_pass_that_fails_is_told_not_raised(compute: bool) -> None:
    summary = summarize(mlp(), torch.zeros(4, 31), compute=compute)
    assert summary.flops is None
    assert summary.problem is not None
    assert "mat1 and mat2" in summary.problem
    assert "forward pass failed" in render(summary)


def test_tied_and_frozen_parameters_count_once_and_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    summary = summarize(model, torch.zeros(2, 4))
    assert (summary.rows[0].parameters, summary.rows[0].trainable) == (26, 16)
    memory = estimate(model, summary, [], 1)
    assert (memory["parameters"], memory["gradients"]) == (26 * 4, 16 * 4)
    assert "10 frozen" in render(summary)


def test_a_narrow_table_has_all_values_in_lines_that_fit() -> None:
    summary = summarize(mlp(), torch.zeros(4, 32))
    for width in (100, 40, 30):
        lines = render(summary, width).splitlines()
        assert max(map(len, lines)) <= width
        assert {"(model)", "Sequential", "N", "698", "1.34"} <= set(
            " ".join(lines).replace(",", " ").split()
        )


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="sgd"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), id="momentum"),
        pytest.param(lambda p: torch.optim.AdamW(p, fused=True), id="adamw-fused"),
        pytest.param(lambda p: torch.optim.RMSprop([{"params": p, "name": "all"}]), id="rmsprop"),
        pytest.param(lambda p: torch.optim.Muon(p[:1]), id="muon"),
    ],
)
def test_optimizer_state_is_what_a_step_leaves(optimizer: Any) -> None:
    made = optimizer([nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))])
    expected = state_bytes(made)
    assert made.state == {}
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    made.step()
    held = [v for s in made.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert expected == sum(value.nbytes for value in held)


def test_the_estimate_adds_up_and_says_what_it_does_not_know() -> None:
    model = mlp()
    summary = summarize(model, torch.zeros(2, 32))
    size = summary.rows[0].parameters * 4
    assert estimate(model, summary, [torch.optim.Adam(model.parameters())], micro_batch=8) == {
        "parameters": size,
        "buffers": 0,
        "gradients": size,
        "optimizer state": 2 * size + 4 * 4,  # two moments, and a step count for each tensor
        "activations": 8 * 16 * 4,
    }
    unknown = estimate(model, summary, [torch.optim.LBFGS(model.parameters())], 8)
    assert unknown["optimizer state"] is None
