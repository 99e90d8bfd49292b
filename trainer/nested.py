"""The tensors of nested batches and of modules: found, and stored in another format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import matching


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a nested batch."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, (list, tuple)):
        children: Iterable[Any] = batch
    else:
        children = batch.values() if isinstance(batch, Mapping) else ()
    for child in children:
        if (found := first_tensor(child)) is not None:
            return found
    return None


def in_format(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating-point tensors in `dtype`, complex ones in its `matching`."""
    # `Module.to(torch.float64)` would discard imaginary parts.
    converted: nn.Module = module._apply(lambda t: t.to(matching(t, dtype)))  # type: ignore[no-untyped-call]
    return converted
