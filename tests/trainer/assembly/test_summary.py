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


FIRST = 32 * 16 + 16  # the parameters of its first layer
LAST = 16 * 10 + 10


class Host(nn.Module):
    """Makes a tensor on the CPU inside: it runs for real or not at all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        self.calls = torch.rand(4) + random.random()
        if not bool((self.calls < 5).all()):
            return x
        return self.norm(self.linear(x) + self.calls)


def test_figures_of_an_mlp_by_hand():
    summary = summarize(mlp(), torch.zeros(4, 32))
    rows = [(row.name, row.output, row.parameters, row.flops) for row in summary.rows]

    assert summary.flops == 2 * (32 * 16 + 16 * 10)
    assert rows == [
        ("", "N x 10", FIRST + LAST, summary.flops),
        ("0", "N x 16", FIRST, 2 * 32 * 16),
        ("1", "N x 16", 0, 0),
        ("2", "N x 10", LAST, 2 * 16 * 10),
    ]
    # The input exists anyway; the ReLU's output is what it and the second layer both keep.
    assert summary.activation_bytes == 16 * 4


def test_activations_of_the_loss_are_counted():
    def loss_of(model, batch):
        inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    inputs = torch.zeros(4, 32)
    labels = torch.zeros(4, dtype=torch.long)
    without_loss = summarize(mlp(), inputs)
    with_loss = summarize(mlp(), (inputs, labels), call=loss_of)
    added = with_loss.activation_bytes - without_loss.activation_bytes

    assert added >= 10 * 4  # the log-probabilities


@pytest.mark.parametrize("width", [100, 40, 30])
def test_a_summary_fits_the_width_of_the_terminal(width):
    summary = summarize(mlp(), torch.zeros(4, 32))
    *table, totals = render(summary, width).splitlines()
    for line in table:
        assert len(line) <= width

    words = " ".join([*table, totals]).replace(",", " ").split()
    assert {"(model)", "Sequential", "N", "698", "1.34"} <= set(words)


def test_memory_of_a_training_by_hand():
    model = mlp()
    summary = summarize(model, torch.zeros(4, 32))
    size = (FIRST + LAST) * 4
    adam = torch.optim.Adam(model.parameters())

    assert estimate(model, summary, [adam], micro_batch=8) == {
        "parameters": size,
        "buffers": 0,
        "gradients": size,
        "optimizer state": 2 * size + 4 * 4,  # two moments, and a step count for each tensor
        "activations": 8 * 16 * 4,
    }

    lbfgs = torch.optim.LBFGS(model.parameters())
    unknown = estimate(model, summary, [lbfgs], micro_batch=8)
    assert unknown["optimizer state"] is None


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), Host()],
    ids=["meta", "real"],
)
@pytest.mark.parametrize("compute", [False, True])
def test_looking_changes_nothing(model, compute):
    model.train()
    first = next(model.children())
    first.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    x = torch.randn(8, 4)
    generator_of_torch = torch.get_rng_state()
    generator_of_python = random.getstate()

    summary = summarize(model, x, compute=compute)

    assert summary.problem is None
    assert summary.flops == 2 * 4 * 4
    assert torch.equal(torch.get_rng_state(), generator_of_torch)
    assert random.getstate() == generator_of_python
    assert not hasattr(model, "calls")
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value)
    for parameter in model.parameters():
        assert parameter.grad is None
    assert [module.training for module in model.modules()] == modes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Recurrent(nn.LSTM):
    def forward(self, x):
        output, _ = super().forward(x)
        return output


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
    x = torch.randn(example)
    meta = summarize(model, x, compute=False)
    computed = summarize(model, x, compute=True)

    assert computed.flops == meta.flops
    assert computed.rows == meta.rows


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
    memory = estimate(model, summary, [], 1)

    whole = summary.rows[0]

    assert whole.parameters == 26
    assert whole.trainable == 16
    assert memory["parameters"] == 26 * 4
    assert memory["gradients"] == 16 * 4
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
    parameters = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
    made = optimizer(parameters)
    expected = state_bytes(made)

    assert made.state == {}

    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made.step()
    held = 0
    for state in made.state.values():
        held += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))

    assert expected == held
