"""Gradients and running statistics are those without checkpointing."""

import pytest
import torch
from torch import nn

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
def test_gradients_and_statistics_are_those_without_checkpointing(apply) -> None:
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
