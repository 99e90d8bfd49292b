"""BatchNorm over several processes, against torch's over the whole batch."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from regimen.trainer.components.recompute import checkpoint_modules
from regimen.trainer.strategies.batchnorm import synchronize
from toys import in_group

KINDS = [
    pytest.param(nn.BatchNorm1d, (), {}, id="1d"),
    pytest.param(nn.BatchNorm1d, (5,), {}, id="1d with length"),
    pytest.param(nn.BatchNorm2d, (3, 2), {}, id="2d"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"momentum": None}, id="cumulative"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"affine": False}, id="not affine"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"track_running_stats": False}, id="not tracked"),
]


class Passes(NamedTuple):
    """What a few passes, second ones too, leave."""

    results: list[torch.Tensor]  # of each pass: outputs, and gradients of the inputs
    buffers: list[torch.Tensor]
    gradients: list[torch.Tensor]


def passes(norm, batches, weight=1.0):
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        output = norm(x)
        loss = (output**3).sum() * weight
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = (gradient**2).sum() * weight
        (loss + penalty).backward()
        results += [output.detach(), x.grad]
    buffers = [buffer.clone() for buffer in norm.buffers()]
    gradients = [parameter.grad for parameter in norm.parameters()]
    return Passes(results, buffers, gradients)


# Cut unevenly: the last process has no sample and borrows the first.
PARTS = [slice(3), slice(3, None), slice(1)]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("kind", "shape", "options"), KINDS)
def test_parts_are_normalized_as_the_whole_is(ranks, kind, shape, options, again):
    """With activations that are computed again, too: they leave the statistics alone."""
    generator = torch.Generator().manual_seed(0)
    whole = 5 + 3 * torch.randn(3, 10, 4, *shape, generator=generator, dtype=torch.float64)
    expected = passes(kind(4, **options).double(), whole)

    def compute(strategy):
        rank = strategy.group.rank
        counts = rank < 2
        norm = nn.Sequential(kind(4, **options).double())
        synchronize(norm, dist.group.WORLD, lambda: counts)
        if again:
            checkpoint_modules(norm, ["0"])
        return passes(norm, whole[:, PARTS[rank]], weight=1.0 if counts else 0.0)

    first, second, borrowing = ranks(3, in_group(compute))

    for one, other, value in zip(first.results, second.results, expected.results, strict=True):
        joined = torch.cat([one, other])
        torch.testing.assert_close(joined, value, rtol=0, atol=1e-9)
    for found in (first, second, borrowing):
        torch.testing.assert_close(found.buffers, expected.buffers, rtol=0, atol=1e-10)
    for i, value in enumerate(expected.gradients):  # each process has its part of them
        total = first.gradients[i] + second.gradients[i] + borrowing.gradients[i]
        torch.testing.assert_close(total, value, rtol=0, atol=1e-8)
