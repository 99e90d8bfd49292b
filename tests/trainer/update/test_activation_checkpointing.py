"""Gradients and running statistics are those without checkpointing."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from trainer.errors import ModelError
from trainer.update.activation_checkpointing import checkpoint_modules, checkpoint_segments


def network() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
    second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(4 * 16, 3)).double()


@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda m: checkpoint_modules(m, ["0", "0.*", "1"]), id="globs"),
        pytest.param(lambda m: checkpoint_segments(m, 2), id="segments"),
        pytest.param(lambda m: checkpoint_segments(m, 4), id="a-segment-a-layer"),
    ],
)
def test_training_is_the_same(apply) -> None:
    plain, saving = network(), network()
    apply(saving)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    for model in (plain, saving):
        for step in range(3):
            torch.manual_seed(step)
            model(x).square().mean().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert plain.state_dict().keys() == saving.state_dict().keys()
    for a, b in zip(plain.state_dict().values(), saving.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_activations_are_really_dropped() -> None:
    saved: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.numel())
        return t

    sizes = []
    for checkpointed in (False, True):
        model = network()
        if checkpointed:
            checkpoint_modules(model, ["0", "1"])
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.randn(5, 1, 8, 8, dtype=torch.float64))
        sizes.append(sum(saved))
    assert sizes[1] < sizes[0] / 2


def test_the_outermost_match_wins() -> None:
    assert checkpoint_modules(network(), ["*"]) == ["0", "1", "2", "3"]


def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(ModelError, match="layer9"):
        checkpoint_modules(network(), ["layer9.*"])


@pytest.mark.parametrize(
    ("model", "segments"),
    [
        pytest.param(nn.Linear(2, 2), 2, id="no-sequential"),
        pytest.param(nn.Sequential(nn.ReLU()), 2, id="too-many"),
    ],
)
def test_segments_that_cannot_be_cut(model: nn.Module, segments: int) -> None:
    with pytest.raises(ModelError, match=r"trainer\.activation_checkpointing_segments"):
        checkpoint_segments(model, segments)


def test_gradients_of_gradients() -> None:
    """A penalty on gradients goes back through a pass twice, and so repeats it twice."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 1)
        ).double()
        if checkpointed:
            checkpoint_modules(model, ["0"])
        x = torch.randn(6, 4, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    for plain, repeated in zip(*results, strict=True):
        torch.testing.assert_close(repeated, plain, rtol=0, atol=1e-12)


class Chancy(nn.Module):
    """A block that draws from Python's and numpy's generators, and assigns a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        scale = random.random() + np.random.rand() + np.random.randn()
        return torch.tanh(self.layer(x - self.mean) * self.mask) * scale


class Held(nn.Module):
    """A block within which generators are attributes: one of each kind, and numpy's others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = [np.random.default_rng(5), np.random.RandomState(6)]
        self.others = {"sfc": np.random.Generator(np.random.SFC64(7))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(6, generator=self.torch, dtype=x.dtype)
        scale = self.python.random() + sum(g.normal() for g in self.numpy)
        return torch.tanh(self.layer(x) * noise) * (scale + self.others["sfc"].random())


class Assigning(nn.Module):
    """A block that counts its passes and makes a generator in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.passes:
            self.generator = torch.Generator().manual_seed(3)
        self.passes += 1
        noise = torch.rand(6, generator=self.generator, dtype=x.dtype)
        return torch.tanh(self.layer(x) * noise) * self.passes


BLOCKS = {"chance": Chancy, "held": lambda: nn.Sequential(Held()), "assigned": Assigning}


def moving(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    if kind in BLOCKS:
        blocks = [BLOCKS[kind](), BLOCKS[kind]()]
    else:
        norm = parametrizations.spectral_norm if kind == "spectral" else spectral_norm
        blocks = [nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 1)).double()


@pytest.mark.parametrize("kind", [*BLOCKS, "spectral", "spectral-hook"])
@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda m: checkpoint_modules(m, ["0", "1"]), id="globs"),
        pytest.param(lambda m: checkpoint_segments(m, 3), id="segments"),
    ],
)
def test_state_that_a_block_changes_is_changed_once(kind: str, apply) -> None:
    plain, saving = moving(kind), moving(kind)
    apply(saving)
    x = torch.randn(5, 6, dtype=torch.float64)
    after = []
    for model in (plain, saving):
        random.seed(0)
        np.random.seed(0)
        for _ in range(3):
            model(x).square().mean().backward()
        after.append((random.random(), np.random.rand()))
    assert after[0] == after[1]
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), saving.buffers(), strict=True):
        assert torch.equal(a, b)


def test_the_next_pass_draws_what_it_would_have_drawn() -> None:
    plain, saving = moving("held"), moving("held")
    checkpoint_modules(saving, ["*"])
    x = torch.randn(5, 6, dtype=torch.float64)
    for model in (plain, saving):
        model(x).sum().backward()
    assert torch.equal(plain(x), saving(x))


@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda m: checkpoint_modules(m, ["0"]), id="globs"),
        pytest.param(lambda m: checkpoint_segments(m, 2), id="segments"),
    ],
)
def test_a_generator_without_a_state_is_refused(apply) -> None:
    model = moving("held")
    model[0][0].python = random.SystemRandom()
    with pytest.raises(ModelError, match=r"activation_checkpointing: 0\.0 holds .*SystemRandom"):
        apply(model)
