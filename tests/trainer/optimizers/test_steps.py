"""A step without torch's label, fused SGD that begins with zeros, Muon over kernels."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regimen.trainer.fast import step_optimizer
from regimen.trainer.optimizers.muon import Muon
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from regimen.trainer.optimizers.state import supports_found_inf

ONES = torch.ones(3)


def steps_of_sgd(late: int, begun: bool = True, **options: Any) -> list[Tensor]:
    """Take four steps with two parameters, of which one has no gradient before step `late`."""
    generator = torch.Generator().manual_seed(0)
    always = nn.Parameter(torch.ones(50, 3))
    later = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([always, later], lr=0.1, weight_decay=0.1, **options)
    if begun:
        Optimizers({"o": optimizer}, {always: "0", later: "1"})
    for step in range(4):
        always.grad = torch.randn(always.shape, generator=generator)
        gradient = torch.randn(later.shape, generator=generator)
        later.grad = gradient if step >= late else None
        optimizer.step()
    return [always.detach(), later.detach()]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_fused_sgd_takes_a_parameter_that_comes_late(momentum: float, nesterov: bool) -> None:
    options = {"momentum": momentum, "nesterov": nesterov}
    for late in (0, 2):
        fused = steps_of_sgd(late, fused=True, **options)
        plain = steps_of_sgd(late, fused=False, **options)
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)

    # Momentum of zeros begins as torch does, to the bit.
    ours = steps_of_sgd(0, begun=True, fused=True, **options)
    theirs = steps_of_sgd(0, begun=False, fused=True, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


DAMPED = {"momentum": 0.9, "dampening": 0.5}
DAMPED_GROUP = {"momentum": 0.9, "param_groups": {"weights": {"kind": "matrix", "dampening": 0.3}}}


@pytest.mark.parametrize(
    ("kind", "options", "fused"),
    [
        pytest.param("Adam", {}, True, id="open"),
        pytest.param("Adam", {"fused": False}, False, id="not wanted"),
        pytest.param("Adam", {"foreach": True}, None, id="another chosen"),
        pytest.param("RMSprop", {}, None, id="none"),
        pytest.param("SGD", DAMPED, None, id="damped"),
        pytest.param("SGD", DAMPED_GROUP, None, id="damped group"),
        pytest.param("Adagrad", {}, None, id="no kernel"),
    ],
)
def test_fused_kernels_are_preferred_where_there_is_a_choice(
    kind: str, options: dict[str, Any], fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.optim.Adagrad.__init__

    @functools.wraps(real)
    def without_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        """As torch 2.11 for Adagrad on CUDA, which notices at the first step."""
        real(self, *args, **kwargs)
        vars(self).pop("_step_supports_amp_scaling", None)

    monkeypatch.setattr(torch.optim.Adagrad, "__init__", without_kernel)
    node = {"_target_": f"torch.optim.{kind}", **options}
    optimizers = build_optimizers(nn.Linear(4, 3), node, prefer_fused=True)

    assert {group.options.get("fused") for group in optimizers.groups()} == {fused}


def one_step(prepare: Callable[[Optimizer], object] = id) -> Optimizer:
    """Step once with AdamW, after something was done with the optimizer."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    prepare(optimizer)
    parameter.grad = torch.arange(3.0)
    step_optimizer(optimizer)
    return optimizer


def parameter_of(optimizer: Optimizer) -> Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    assert isinstance(parameter, Tensor)
    return parameter


def test_a_step_without_the_label_is_the_same_step() -> None:
    with torch.autograd.profiler.profile() as profile:
        labelled = one_step()
    plain = one_step()
    labels = [event.name for event in profile.function_events]

    assert "Optimizer.step#AdamW.step" in labels
    assert torch.equal(parameter_of(plain), parameter_of(labelled))


def test_what_stands_around_a_step_is_called() -> None:
    called: list[str] = []

    def hook_before(optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))

    def hook_behind(optimizer: Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: called.append("behind"))

    def replace(optimizer: Optimizer) -> None:
        optimizer.step = lambda: called.append("replaced")  # type: ignore[method-assign, assignment]

    one_step(hook_before)
    one_step(hook_behind)
    one_step(replace)

    assert called == ["before", "behind", "replaced"]


def test_a_step_that_is_decorated_is_called() -> None:
    called: list[str] = []

    class Decorated(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW.step)  # which torch has labelled by now
        def step(self, *args: Any) -> Any:
            called.append("decorated")
            return super().step(*args)

    one_step()  # torch labels the class at its first step
    step_optimizer(Decorated([nn.Parameter(torch.ones(3))]))

    assert called == ["decorated"]


def test_a_scheduler_notes_a_step_without_the_label(recwarn: pytest.WarningsRecorder) -> None:
    schedulers: list[torch.optim.lr_scheduler.StepLR] = []

    def schedule(optimizer: Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        schedulers.append(scheduler)

    one_step(schedule)
    schedulers[0].step()

    assert not recwarn.list


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_is_without_gradients_and_leaves_the_mode_as_it_was(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        stepped = one_step()
        assert torch.is_grad_enabled() is enabled
    parameter = parameter_of(stepped)
    assert parameter.grad_fn is None
    assert not stepped.state[parameter]["exp_avg"].requires_grad


def test_a_step_that_is_differentiated_through_keeps_its_graph() -> None:
    start = torch.ones(3, requires_grad=True)
    moved = start.clone()
    moved.retain_grad()
    moved.sum().backward(retain_graph=True)
    optimizer = torch.optim.SGD([start], lr=0.1)
    optimizer.param_groups[0]["params"] = [moved]
    optimizer.param_groups[0]["differentiable"] = True
    optimizer.defaults["differentiable"] = True
    step_optimizer(optimizer)

    assert moved.grad_fn is not None


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_a_kernel_as_a_matrix(
    memory_format: torch.memory_format, normalized: bool
) -> None:
    formats = {torch.contiguous_format, torch.channels_last}
    (other,) = formats - {memory_format}
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
    kernel = nn.Parameter(begin.to(memory_format=memory_format, copy=True))
    matrix = nn.Parameter(begin.flatten(1).clone())
    ours = Muon([kernel], lr=0.1, normalized=normalized)
    plain = torch.optim.Muon([matrix], lr=0.1)
    for step in range(3):
        if step == 2:  # it goes on with a momentum of another layout
            state = ours.state[kernel]
            state["momentum_buffer"] = state["momentum_buffer"].to(memory_format=other)
        # The gradient has the layout of the weight, or another one.
        gradient = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
        kernel.grad = gradient
        matrix.grad = gradient.flatten(1)
        if normalized:
            with torch.no_grad():
                matrix *= 2 / matrix.norm()  # the root of its 4 rows
        ours.step()
        plain.step()

    rtol = 1e-12 if normalized else 0

    torch.testing.assert_close(kernel.flatten(1).detach(), matrix.detach(), rtol=rtol, atol=0)
    assert not torch.equal(kernel, begin)
    assert ours.state[kernel]["momentum_buffer"].shape == kernel.shape


def test_muon_leaves_out_a_step_where_the_device_says_so() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    muon = Muon([kernel], normalized=True)

    assert supports_found_inf(muon)

    kept = torch.zeros_like(kernel)  # the momentum of no step
    for bad in (True, False, True):
        kernel.grad = torch.full_like(kernel, torch.nan) if bad else torch.randn_like(kernel)
        muon.found_inf = torch.tensor(float(bad))  # type: ignore[attr-defined]
        before = kernel.detach().clone()
        muon.step()
        momentum = muon.state[kernel]["momentum_buffer"]
        assert torch.equal(kernel, before) is bad
        assert torch.equal(momentum, kept) is bad
        kept = momentum.clone()
