"""How an optimizer takes a step: by which kernel, from which state, with which closure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import SGD, Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Tell whether `step` must be given a closure that computes the loss, as LBFGS's must."""
    return takes_closure(type(optimizer))


def takes_closure(kind: type[Any]) -> bool:
    """Tell whether the `step` of a class must be given a closure."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    return closure is not None and closure.default is inspect.Parameter.empty


def can_leave_out(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer's kernel can leave a step out as if it had not been asked for.

    Fused kernels can. But damped SGD begins with a step unlike its others, which must be taken.
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return fused and not (isinstance(optimizer, SGD) and any(map(damped, optimizer.param_groups)))


def damped(group: Mapping[str, Any]) -> bool:
    """Tell whether a group of SGD leaves out a share of each gradient, but of the first one."""
    return bool(group.get("momentum")) and bool(group.get("dampening"))


def begin_with_zeros(optimizer: Optimizer, *_: Any) -> None:
    """Before a step, give momentum of zeros to what fused SGD is to move for the first time.

    torch makes all of it at the first step, as copies of the gradients: a parameter whose first
    gradient comes later is a TypeError, and a first step that its kernel leaves out leaves what
    was in memory. From zeros the kernel computes the same, to the bit.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not damped(group):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter.grad)
