"""BatchNorm over several processes, against torch's over the whole batch."""

from functools import partial

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


def passes(norm, batches, counts=1.0):
    """Return outputs and gradients of a few passes, second ones too, and the buffers after them."""
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        output = norm(x)
        loss = (output**3).sum() * counts
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (gradient**2).sum() * counts
        loss.backward()
        results += [output.detach(), x.grad]
    return results, [b.clone() for b in norm.buffers()], [p.grad for p in norm.parameters()]


@pytest.mark.parametrize(("kind", "shape", "options"), KINDS)
def test_parts_are_normalized_as_the_whole_is(ranks, kind, shape, options):
    """With activations that are computed again, too: they leave the statistics alone."""
    generator = torch.Generator().manual_seed(0)
    whole = 5 + 3 * torch.randn(3, 10, 4, *shape, generator=generator, dtype=torch.float64)
    expected, buffers, gradients = passes(kind(4, **options).double(), whole)

    def compute(strategy, again):
        rank, counts = strategy.group.rank, strategy.group.rank < 2
        norm = nn.Sequential(kind(4, **options).double())
        synchronize(norm, dist.group.WORLD, lambda: counts)
        if again:
            checkpoint_modules(norm, ["0"])
        # Cut unevenly: the last process has no sample and borrows the first.
        cut = slice(3) if rank == 0 else slice(3, None) if rank == 1 else slice(1)
        return passes(norm, whole[:, cut], float(counts))

    for again in (False, True):
        found = ranks(3, in_group(partial(compute, again=again)))
        for i, value in enumerate(expected):
            joined = torch.cat([results[i] for results, _, _ in found[:-1]])
            torch.testing.assert_close(joined, value, rtol=0, atol=1e-9)
        for _, own, _ in found:
            torch.testing.assert_close(own, buffers, rtol=0, atol=1e-10)
        for i, value in enumerate(gradients):  # each process has its part of them
            total = sum(own[i] for _, _, own in found)
            torch.testing.assert_close(total, value, rtol=0, atol=1e-8)
