"""Gradients between backward and step: their norm, clipping and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.optimizers.optimizers import Optimizers
from trainer.options import Clipping, GradientNoise
from trainer.rng import derived


@torch.no_grad()
def add_noise(
    noise: GradientNoise, parameters: Sequence[Tensor], update: int, turn: str = ""
) -> None:
    """Add an update's noise to the gradients, drawn on their device."""
    std, seed = noise.std(update), derived(noise.seed, "gradient noise", update, turn)
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.device not in generators:
            generators[grad.device] = torch.Generator(grad.device).manual_seed(seed)
        drawn = torch.randn(
            grad.shape, generator=generators[grad.device], dtype=grad.dtype, device=grad.device
        )
        grad.add_(_placed_like(drawn, grad), alpha=std)


def _placed_like(noise: Tensor, grad: Any) -> Tensor:
    """Return the shard of noise that every process has drawn in full."""
    if not hasattr(grad, "device_mesh"):
        return noise
    from torch.distributed.tensor import distribute_tensor  # an import of 0.5 s that few runs need

    return distribute_tensor(noise, grad.device_mesh, grad.placements, src_data_rank=None)


def without_effect(
    precision: str, norm: float | None, value: float | None, noise: object
) -> list[str]:
    """Return the keys of `trainer` without effect on LBFGS, which computes gradients itself."""
    asked = {
        "precision": precision == "fp16",
        "clip_grad_norm": norm is not None,
        "clip_grad_value": value is not None,
        "gradient_noise": noise is not None,
    }
    return [key for key, is_asked in asked.items() if is_asked]


def total_norm(parameters: Sequence[Tensor], norm_type: float = 2.0, alike: bool = False) -> Tensor:
    """Return the p-norm of all gradients as one vector; a scalar tensor on their device.

    Parameters that are `alike` are not grouped by device and dtype again.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not alike or not gradients:
        return _norm(gradients, norm_type)
    norms = torch._foreach_norm(gradients, norm_type)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def are_alike(parameters: Sequence[Tensor]) -> bool:
    """Return whether parameters are plain tensors of one device and one dtype."""
    plain = all(type(p) in (Tensor, nn.Parameter) for p in parameters)
    return plain and len({(p.device, p.dtype) for p in parameters}) == 1


def largest(parameters: Sequence[Tensor]) -> Tensor:
    """Return the largest entry of all parameters; NaN if any is NaN."""
    return _norm([p.detach() for p in parameters], math.inf)


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    norm = get_total_norm(tensors, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded: of all ranks


def clip(
    clipping: Clipping,
    optimizers: Optimizers,
    parameters: Sequence[Tensor],
    norm: Tensor,
    alike: bool = False,
) -> None:
    """Clip the gradients in place; `norm` is their norm before, `alike` as for `total_norm`."""
    if clipping.norm is not None:
        if clipping.per_group:
            for group in optimizers.groups():
                members = group.options["params"]
                _clip_norm(members, clipping.norm, total_norm(members, clipping.norm_type), alike)
        else:
            _clip_norm(parameters, clipping.norm, norm, alike)
    if clipping.value is not None:
        # Real and imaginary parts of complex gradients are clipped separately.
        grads = [_real(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_clamp_min_(grads, -clipping.value)
        torch._foreach_clamp_max_(grads, clipping.value)


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _clip_norm(parameters: Sequence[Tensor], bound: float, norm: Tensor, alike: bool) -> None:
    # torch multiplies by min(1, bound / (norm + 1e-6)); on a CPU the norm is there to be looked
    # at, and the pass over all gradients is saved when the factor is 1.
    on_cpu = norm.device.type == "cpu"
    if on_cpu and bound / (norm.item() + 1e-6) >= 1:
        return
    if on_cpu or not alike:
        clip_grads_with_norm_(parameters, bound, norm)
    else:  # the same, but a number divided by a tensor is two kernels, a tensor by a tensor one
        factor = torch.div(torch.tensor(bound, dtype=norm.dtype), norm + 1e-6).clamp_(max=1.0)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


def is_finite(norm: Tensor) -> bool:
    """Return whether a norm, and so every gradient, is finite; waits for the device."""
    return math.isfinite(norm.item())
