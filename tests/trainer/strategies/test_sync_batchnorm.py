"""BatchNorm over several processes, against torch's over the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.strategies.ddp import synchronize
from trainer.update.precision import checkpoint_modules

KINDS = [
    pytest.param(nn.BatchNorm1d, (), {}, id="1d"),
    pytest.param(nn.BatchNorm1d, (5,), {}, id="1d with length"),
    pytest.param(nn.BatchNorm2d, (3, 2), {}, id="2d"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"momentum": None}, id="cumulative"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"affine": False}, id="not affine"),
    pytest.param(nn.BatchNorm2d, (3, 2), {"track_running_stats": False}, id="not tracked"),
]


def parts(batch, world_size):
    """Cut unevenly: the last process has no sample and borrows the first."""
    cuts = list(batch.tensor_split([3 * (i + 1) for i in range(world_size - 2)]))
    return [*cuts, batch[:1]]


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


def batches(shape):
    generator = torch.Generator().manual_seed(0)
    return [
        5 + 3 * torch.randn(10, 4, *shape, generator=generator, dtype=torch.float64)
        for _ in range(3)
    ]


def each(ranks, world_size, compute):
    """Return what each process computes; the last one's samples do not count."""

    def run(rank):
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        result = compute(rank, dist.group.WORLD, lambda: rank < world_size - 1)
        dist.barrier()
        dist.destroy_process_group()
        return result

    return ranks(world_size, run)


@pytest.mark.parametrize(("kind", "shape", "options"), KINDS)
def test_parts_are_normalized_as_the_whole_is(ranks, kind, shape, options):
    world_size, whole = 3, batches(shape)
    expected, buffers, gradients = passes(kind(4, **options).double(), whole)

    def compute(rank, group, counts):
        norm = kind(4, **options).double()
        synchronize(norm, group, counts)
        own = [parts(batch, world_size)[rank] for batch in whole]
        return passes(norm, own, float(counts()))

    found = each(ranks, world_size, compute)
    for i, value in enumerate(expected):
        joined = torch.cat([results[i] for results, _, _ in found[:-1]])
        torch.testing.assert_close(joined, value, rtol=0, atol=1e-9)
    for _, own, _ in found:
        for buffer, value in zip(own, buffers, strict=True):
            torch.testing.assert_close(buffer, value, rtol=0, atol=1e-10)
    for i, value in enumerate(gradients):  # each process has its part of them
        total = sum(own[i] for _, _, own in found)
        torch.testing.assert_close(total, value, rtol=0, atol=1e-8)


def test_evaluation_and_names_are_torchs(ranks):
    plain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).double()
    plain(batches((3, 2))[0])
    plain.eval()

    def compute(rank, group, counts):
        synchronize(plain, group, counts)
        asked = [plain(b).detach() for b in batches((3, 2))[: 1 + rank]]  # nobody waits
        return asked[0], list(plain.state_dict())

    names, expected = list(plain.state_dict()), plain(batches((3, 2))[0]).detach()
    for output, own in each(ranks, 2, compute):
        assert torch.equal(output, expected)
        assert own == names


def test_activations_computed_again_leave_statistics_alone(ranks):
    def compute(rank, group, counts):
        results = []
        for again in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
            model = nn.Sequential(model)
            synchronize(model, group, counts)
            if again:
                checkpoint_modules(model, ["0"])
            results.append(passes(model, [b[:, :, 0, 0] for b in batches((3, 2))]))
        return results

    for once, again in each(ranks, 2, compute):
        for one, other in zip(once, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
