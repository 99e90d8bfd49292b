"""The summary's figures against counts by hand, and that looking changes nothing."""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regimen.models.resnet import ResNet
from regimen.models.vit import ViT
from regimen.trainer.assembly.summary import estimate, render, state_bytes, summarize


def mlp():
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


class Host(nn.Module):
    """Makes a tensor on the CPU inside: it runs for real or not at all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        self.calls = torch.rand(4) + random.random()
        return self.norm(self.linear(x) + self.calls) if bool((self.calls < 5).all()) else x


def test_figures_of_an_mlp_by_hand():
    model = mlp()
    summary = summarize(model, torch.zeros(4, 32))
    assert [(r.name, r.output, r.parameters, r.flops) for r in summary.rows] == [
        ("", "N x 10", 32 * 16 + 16 + 16 * 10 + 10, summary.flops),
        ("0", "N x 16", 32 * 16 + 16, 2 * 32 * 16),
        ("1", "N x 16", 0, 0),
        ("2", "N x 10", 16 * 10 + 10, 2 * 16 * 10),
    ]
    assert summary.flops == 2 * (32 * 16 + 16 * 10)
    # The input exists anyway; the ReLU's output is what it and the second layer both keep.
    assert summary.activation_bytes == 16 * 4
    batch = (torch.zeros(4, 32), torch.zeros(4, dtype=torch.long))
    with_loss = summarize(model, batch, call=lambda m, b: cross_entropy(m(b[0]), b[1]))
    assert with_loss.activation_bytes - 16 * 4 >= 10 * 4  # the log-probabilities
    for width in (100, 40, 30):
        lines = render(summary, width).splitlines()
        assert max(map(len, lines[:-1])) <= width  # of the table; the totals are one line
        words = " ".join(lines).replace(",", " ").split()
        assert {"(model)", "Sequential", "N", "698", "1.34"} <= set(words)
    size = 698 * 4
    assert estimate(model, summary, [torch.optim.Adam(model.parameters())], micro_batch=8) == {
        "parameters": size,
        "buffers": 0,
        "gradients": size,
        "optimizer state": 2 * size + 4 * 4,  # two moments, and a step count for each tensor
        "activations": 8 * 16 * 4,
    }
    unknown = estimate(model, summary, [torch.optim.LBFGS(model.parameters())], 8)
    assert unknown["optimizer state"] is None


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), Host()],
    ids=["meta", "real"],
)
@pytest.mark.parametrize("compute", [False, True])
def test_looking_changes_nothing(model, compute):
    model.train()
    next(model.children()).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    x = torch.randn(8, 4)
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


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (mlp(), (4, 32)),
        (ResNet(18, 10, in_channels=1, stem="cifar"), (2, 1, 16, 16)),
        (ViT(10, depth=2, dim=24), (2, 1, 16, 16)),
        (Recurrent(4, 8, batch_first=True), (2, 5, 4)),
    ],
    ids=["mlp", "resnet", "attention", "recurrent"],
)
def test_computing_finds_what_the_meta_device_finds(model, example):
    meta, computed = (summarize(model, torch.randn(example), compute=c) for c in (False, True))
    assert (computed.flops, computed.rows) == (meta.flops, meta.rows)


@pytest.mark.parametrize("compute", [False, True])
def test_a_forward_pass_that_fails_is_told_not_raised(compute):
    summary = summarize(mlp(), torch.zeros(4, 31), compute=compute)
    assert summary.flops is None
    assert summary.problem is not None
    assert "mat1 and mat2" in summary.problem
    assert "forward pass failed" in render(summary)


class Slope(nn.Module):
    """Answers with the gradient of a network at its inputs, as networks for equations do."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return torch.func.grad(lambda inputs: self.network(inputs).sum())(x)


@pytest.mark.parametrize("compute", [False, True])
def test_what_cannot_be_counted_within_a_forward_pass_is_left_out_and_said(compute):
    model = Slope()
    summary = summarize(model, torch.zeros(4, 2), compute=compute)
    assert summary.problem is None
    shapes = ["N x 2", "N x 1", "N x 8", "N x 8", "N x 1"]
    assert [(row.output, row.flops) for row in summary.rows] == [(s, None) for s in shapes]
    text = render(summary)
    assert "torch cannot count its FLOPs and activations: RuntimeError: torch.func" in text
    assert "failed" not in text
    memory = estimate(model, summary, [], 1)
    assert (memory["parameters"], memory["activations"]) == (33 * 4, None)
    model(torch.ones(4, 2)).sum().backward()  # it trains as before
    assert all(p.grad.isfinite().all() for p in model.network[:1].parameters())


def test_tied_and_frozen_parameters_count_once_and_as_such():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    summary = summarize(model, torch.zeros(2, 4))
    assert (summary.rows[0].parameters, summary.rows[0].trainable) == (26, 16)
    memory = estimate(model, summary, [], 1)
    assert (memory["parameters"], memory["gradients"]) == (26 * 4, 16 * 4)
    assert "10 frozen" in render(summary)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop([{"params": p, "name": "all"}]),
        lambda p: torch.optim.Muon(p[:1]),
    ],
    ids=["sgd", "momentum", "adamw-fused", "rmsprop", "muon"],
)
def test_optimizer_state_is_what_a_step_leaves(optimizer):
    made = optimizer([nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))])
    expected = state_bytes(made)
    assert made.state == {}
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    made.step()
    held = [v for s in made.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert expected == sum(value.nbytes for value in held)
