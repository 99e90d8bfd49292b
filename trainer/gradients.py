"""Between backward and step: the norm of the gradients, and their clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Clipping:
    """Say how gradients are bounded before a step; None: not at all."""

    norm: float | None = None
    norm_type: float = 2.0
    per_group: bool = False  # bound the norm of each parameter group by itself
    value: float | None = None


def total_norm(parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the p-norm of all gradients as one vector; a scalar tensor on their device."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(grads, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded: of all ranks


def clip(
    clipping: Clipping, optimizers: Optimizers, parameters: Sequence[Tensor], norm: Tensor
) -> None:
    """Bound the gradients; `norm` is theirs, taken before."""
    if clipping.norm is not None:
        if clipping.per_group:
            for group in optimizers.groups():
                members = group.options["params"]
                _clip_norm(members, clipping.norm, total_norm(members, clipping.norm_type))
        else:
            _clip_norm(parameters, clipping.norm, norm)
    if clipping.value is not None:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_clamp_min_(grads, -clipping.value)
        torch._foreach_clamp_max_(grads, clipping.value)


def _clip_norm(parameters: Sequence[Tensor], bound: float, norm: Tensor) -> None:
    # torch multiplies by min(1, bound / (norm + 1e-6)); on a CPU the norm is there to be looked
    # at, and the pass over all gradients is saved when the factor is 1.
    if norm.device.type == "cpu" and bound / (norm.item() + 1e-6) >= 1:
        return
    clip_grads_with_norm_(parameters, bound, norm)


def is_finite(norm: Tensor) -> bool:
    """Tell whether a norm, and so every gradient, is finite; waits for the device."""
    return math.isfinite(norm.item())
