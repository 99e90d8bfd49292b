"""A step without torch's label, fused SGD that begins with zeros, Muon over kernels."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.optimizers.muon import Muon
from trainer.optimizers.optimizers import Optimizers, build_optimizers
from trainer.optimizers.state import can_leave_out, take_step

ONES = torch.ones(3)


def steps_of_sgd(late: int, fused: bool, **options: Any) -> tuple[list[Tensor], Optimizer]:
    """Take four steps with two parameters, of which one has no gradient before step `late`."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=fused, **options)
    Optimizers({"o": optimizer}, {p: str(i) for i, p in enumerate(parameters)})
    for step in range(4):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if index == 0 or step >= late else None
        optimizer.step()
    return [p.detach() for p in parameters], optimizer


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd_takes_a_parameter_that_comes_late(
    late: int, momentum: float, nesterov: bool
) -> None:
    options = {"momentum": momentum, "weight_decay": 0.1, "nesterov": nesterov and momentum > 0}
    fused, _ = steps_of_sgd(late, True, **options)
    plain, _ = steps_of_sgd(late, False, **options)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_momentum_of_zeros_begins_as_torch_does_to_the_bit() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(50, 3) for _ in range(3)]
    ends = []
    for zeros in (True, False):
        parameter = nn.Parameter(torch.ones(50, 3))
        options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True, **options)
        if zeros:
            Optimizers({"o": optimizer}, {parameter: "p"})
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameter.detach())
    assert torch.equal(*ends)


def test_damped_momentum_is_not_fused() -> None:
    damped: dict[str, Any] = {"_target_": "torch.optim.SGD", "momentum": 0.9, "dampening": 0.5}
    groups = {"weights": {"kind": "matrix", "dampening": 0.3}}
    damped_group = {"_target_": "torch.optim.SGD", "momentum": 0.9, "param_groups": groups}
    for node in (damped, damped_group):
        optimizers = build_optimizers(nn.Linear(4, 3), node, prefer_fused=True)
        assert not any(group.options["fused"] for group in optimizers.groups())


def test_where_torch_has_no_fused_kernel_another_is_taken(monkeypatch) -> None:
    """As torch 2.11 for Adagrad on CUDA, which notices at the first step."""
    real = torch.optim.Adagrad.__init__

    @functools.wraps(real)
    def without_kernel(self, *args, **kwargs):
        real(self, *args, **kwargs)
        vars(self).pop("_step_supports_amp_scaling", None)

    monkeypatch.setattr(torch.optim.Adagrad, "__init__", without_kernel)
    node = {"_target_": "torch.optim.Adagrad", "lr": 0.1}
    optimizers = build_optimizers(nn.Linear(2, 2), node, prefer_fused=True)
    (optimizer,) = optimizers.optimizers.values()
    assert not optimizer.param_groups[0]["fused"]


def one_step(prepare: Callable[[Optimizer], object] = id) -> Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    prepare(optimizer)
    parameter.grad = torch.arange(3.0)
    take_step(optimizer)
    return optimizer


def test_a_step_without_the_label_is_the_same_step() -> None:
    with torch.autograd.profiler.profile() as profile:
        labelled = one_step()
    assert any(event.name == "Optimizer.step#AdamW.step" for event in profile.function_events)
    plain = one_step()
    assert torch.equal(plain.param_groups[0]["params"][0], labelled.param_groups[0]["params"][0])


def test_what_stands_around_a_step_is_called() -> None:
    called: list[object] = []

    def replace(optimizer: Optimizer) -> None:
        optimizer.step = lambda: called.append(1)  # type: ignore[method-assign, assignment]

    one_step(lambda optimizer: optimizer.register_step_pre_hook(lambda *_: called.append(1)))
    one_step(lambda optimizer: optimizer.register_step_post_hook(lambda *_: called.append(1)))
    one_step(replace)
    assert len(called) == 3

    @functools.wraps(torch.optim.AdamW.step)  # which torch has labelled by now
    def decorated(*args: Any) -> Any:
        called.append(1)
        return torch.optim.AdamW.step(*args)

    take_step(type("Decorated", (torch.optim.AdamW,), {"step": decorated})([nn.Parameter(ONES)]))
    assert len(called) == 4


def test_a_scheduler_notes_a_step_without_the_label(recwarn: pytest.WarningsRecorder) -> None:
    made: list[torch.optim.lr_scheduler.StepLR] = []
    one_step(lambda o: made.append(torch.optim.lr_scheduler.StepLR(o, step_size=1)))
    made[0].step()
    assert not recwarn.list


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_is_without_gradients_and_leaves_the_mode_as_it_was(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        stepped = one_step()
        assert torch.is_grad_enabled() is enabled
    (parameter,) = stepped.param_groups[0]["params"]
    assert parameter.grad_fn is None
    assert not stepped.state[parameter]["exp_avg"].requires_grad


def test_a_step_that_is_differentiated_through_keeps_its_graph() -> None:
    start = torch.ones(3, requires_grad=True)
    moved = start.clone()
    moved.retain_grad()
    moved.sum().backward(retain_graph=True)
    optimizer = torch.optim.SGD([start], lr=0.1)
    optimizer.param_groups[0]["params"], optimizer.param_groups[0]["differentiable"] = [moved], True
    optimizer.defaults["differentiable"] = True
    take_step(optimizer)
    assert moved.grad_fn is not None


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_a_kernel_as_a_matrix(
    memory_format: torch.memory_format, normalized: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    kernel = nn.Parameter(begin.to(memory_format=memory_format, copy=True))
    matrix = nn.Parameter(begin.flatten(1).clone())
    ours, plain = Muon([kernel], lr=0.1, normalized=normalized), torch.optim.Muon([matrix], lr=0.1)
    for _ in range(3):
        grad = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
        kernel.grad, matrix.grad = grad, grad.flatten(1)  # a gradient of either layout
        with torch.no_grad():
            matrix *= 2 / matrix.norm() if normalized else 1  # the root of its 4 rows
        ours.step()
        plain.step()
    rtol = 1e-12 if normalized else 0
    torch.testing.assert_close(kernel.flatten(1).detach(), matrix.detach(), rtol=rtol, atol=0)
    assert not torch.equal(kernel, begin)
    assert ours.state[kernel]["momentum_buffer"].shape == kernel.shape


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
