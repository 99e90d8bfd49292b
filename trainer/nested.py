"""The tensors of nested batches and of modules: found, and stored in another format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import matching


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a nested batch."""
    return next(tensors_of(batch), None)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for child in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(child)


def in_format(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a module's floating-point tensors in `dtype`, complex ones in its `matching`."""
    # `Module.to(torch.float64)` would discard imaginary parts.
    converted: nn.Module = module._apply(lambda t: t.to(matching(t, dtype)))  # type: ignore[no-untyped-call]
    return converted
