"""Muon over matrices and kernels, against torch's."""

import pytest
import torch
from torch import nn

from trainer.optimizers.muon import Muon
from trainer.optimizers.steps import can_leave_out


@pytest.mark.parametrize(
    "memory_format",
    [
        pytest.param(torch.contiguous_format, id="contiguous"),
        pytest.param(torch.channels_last, id="channels-last"),
    ],
)
def test_muon_takes_a_kernel_as_a_matrix(memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    kernel = nn.Parameter(begin.to(memory_format=memory_format, copy=True))
    matrix = nn.Parameter(begin.flatten(1).clone())
    ours, plain = Muon([kernel], lr=0.1), torch.optim.Muon([matrix], lr=0.1)
    for _ in range(3):
        grad = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
        kernel.grad, matrix.grad = grad, grad.flatten(1)  # a gradient of either layout
        ours.step()
        plain.step()
    assert torch.equal(kernel.flatten(1), matrix)
    assert not torch.equal(kernel, begin)
    assert ours.state[kernel]["momentum_buffer"].shape == kernel.shape


def test_muon_keeps_the_norm_of_a_kernel_where_it_is_told_to() -> None:
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    kernel, matrix = nn.Parameter(begin.clone()), nn.Parameter(begin.flatten(1).clone())
    ours = Muon([kernel], lr=0.1, weight_decay=0.0, normalized=True)
    plain = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        grad = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
        kernel.grad, matrix.grad = grad, grad.flatten(1)
        with torch.no_grad():
            matrix *= 2 / matrix.norm()  # the root of its 4 rows
        ours.step()
        plain.step()
    torch.testing.assert_close(kernel.flatten(1).detach(), matrix.detach(), rtol=1e-12, atol=0)


def test_muon_leaves_out_a_step_where_the_device_says_so() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    muon = Muon([kernel], normalized=True)
    assert can_leave_out(muon)
    for bad in (1.0, 0.0, 1.0):
        kernel.grad = torch.full_like(kernel, torch.nan) if bad else torch.randn_like(kernel)
        muon.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
        before, momentum = kernel.detach().clone(), muon.state[kernel].get("momentum_buffer")
        kept = torch.zeros_like(kernel) if momentum is None else momentum.clone()
        muon.step()
        assert torch.equal(kernel, before) is bool(bad)
        assert torch.equal(muon.state[kernel]["momentum_buffer"], kept) is bool(bad)


def test_muon_goes_on_with_a_momentum_of_another_layout() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    permuted = nn.Parameter(kernel.detach().clone())
    ours, other = Muon([kernel]), Muon([permuted])
    momentum = torch.randn(4, 3, 3, 3)
    ours.state[kernel]["momentum_buffer"] = momentum.contiguous()
    other.state[permuted]["momentum_buffer"] = momentum.to(memory_format=torch.channels_last)
    kernel.grad = permuted.grad = torch.randn(4, 3, 3, 3)
    ours.step()
    other.step()
    assert torch.equal(kernel, permuted)
    assert torch.equal(
        ours.state[kernel]["momentum_buffer"], other.state[permuted]["momentum_buffer"]
    )
