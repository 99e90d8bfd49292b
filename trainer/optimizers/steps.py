"""Properties of an optimizer's step: its kernel, its initial state, its closure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module
from torch.optim import SGD, Optimizer

# The wrapper that torch puts around `step` of every class of optimizers, and the one of its own.
_LABELLED = Optimizer.profile_hook_step(lambda: None).__code__
_SWITCHED = optimizer_module._use_grad_for_differentiable(lambda self: None).__code__


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without what torch puts around it where nothing needs that.

    The label for profilers takes 30 us. It is needed by a profiler and by hooks; a `step` that is
    not torch's own wrapper (compiled, decorated) is called as it is. Gradients are switched off
    here: where torch does it, it imports its compiler, which takes seconds.
    """
    step = _unlabelled(optimizer)
    if step is None:
        optimizer.step()
    elif step.__code__ is not _SWITCHED or optimizer.defaults["differentiable"]:
        step(optimizer)
    else:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            step.__wrapped__(optimizer)
        finally:
            torch._C._set_grad_enabled(enabled)


def _unlabelled(optimizer: Optimizer) -> Any:
    """Return the function below torch's label, or None if `step` has to be called as it is."""
    labelled = type(optimizer).step
    # A scheduler of torch replaces `step` of an object to note that it was called.
    noted = vars(optimizer).get("step")
    if (
        getattr(labelled, "__code__", None) is not _LABELLED
        or not (noted is None or hasattr(noted, "_wrapped_by_lr_sched"))
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return None
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return labelled.__wrapped__  # type: ignore[attr-defined]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` requires a closure that computes the loss, as LBFGS does."""
    return takes_closure(type(optimizer))


def takes_closure(kind: type[Any]) -> bool:
    """Return whether the `step` of a class requires a closure."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    return closure is not None and closure.default is inspect.Parameter.empty


def can_leave_out(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel can skip a step without a trace.

    Fused kernels can. The exception is SGD with dampening, whose first step differs from the
    others and must not be skipped.
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return fused and not (isinstance(optimizer, SGD) and any(map(damped, optimizer.param_groups)))


def damped(group: Mapping[str, Any]) -> bool:
    """Return whether a group of SGD applies dampening: to every gradient except the first."""
    return bool(group.get("momentum")) and bool(group.get("dampening"))


def begin_with_zeros(optimizer: Optimizer, *_: Any) -> None:
    """Step pre-hook: create momentum buffers of zeros for fused SGD.

    torch creates all buffers at the first step, as copies of the gradients. It then raises
    TypeError for a parameter whose first gradient comes later, and a first step that the kernel
    skips leaves uninitialized memory in the buffers. Starting from zeros gives the same result, bit
    for bit.
    """
    begin = [g for g in optimizer.param_groups if g["fused"] and g["momentum"] and not damped(g)]
    for parameter in (p for group in begin for p in group["params"] if p.grad is not None):
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
