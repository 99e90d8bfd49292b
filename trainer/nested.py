"""Tensors wherever they lie in nested containers and modules: found, mapped, moved, converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to every tensor in nested containers; the containers are new ones."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return set(batch) if isinstance(batch, set) else batch


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a nested batch."""
    if isinstance(batch, Tensor):
        return batch
    children = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, (Mapping, list, tuple)):
        return next((t for t in map(first_tensor, children) if t is not None), None)
    return None


def to_device(
    batch: Any, device: torch.device, dtype: torch.dtype | None, channels_last: bool
) -> Any:
    """Move a batch; numbers take the format of `dtype`, images (N, C, H, W) channels last."""

    def move(t: Tensor) -> Tensor:
        t = t.to(device, None if dtype is None else matching(t, dtype), non_blocking=True)
        if channels_last and t.ndim == 4:
            t = t.contiguous(memory_format=torch.channels_last)
        return t

    if device.type == "cpu" and dtype is None and not channels_last:
        return batch
    return map_tensors(move, batch)


def in_format(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating-point tensors in `dtype`, complex ones in its `matching`."""
    # `Module.to(torch.float64)` would discard imaginary parts.
    converted: nn.Module = module._apply(lambda t: t.to(matching(t, dtype)))  # type: ignore[no-untyped-call]
    return converted


def matching(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the format of a tensor in a run of `dtype`: only float64 has a complex companion."""
    if tensor.is_complex():
        return torch.complex128 if dtype == torch.float64 else tensor.dtype
    return dtype if tensor.is_floating_point() else tensor.dtype
