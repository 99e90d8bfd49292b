"""An estimate of the memory that training needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optimizers.steps import take_step
from trainer.summary.model import Summary


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; None where they are unknown."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: int | None  # of one micro-batch
    data: int | None = 0  # kept on the device (data.cache=device)

    @property
    def total(self) -> int:
        """The sum of all known parts in bytes."""
        known = (self.parameters, self.buffers, self.gradients, self.optimizer, self.activations)
        return sum(part or 0 for part in (*known, self.data))

    @property
    def complete(self) -> bool:
        """Whether every part is known."""
        return None not in (self.optimizer, self.activations, self.data)


def estimate(summary: Summary, optimizers: Iterable[Optimizer], micro_batch: int) -> MemoryEstimate:
    """Add up a model, its gradients, its optimizers' state and a micro-batch's activations."""
    states = [state_bytes(optimizer) for optimizer in optimizers]
    activations = summary.activation_bytes
    return MemoryEstimate(
        parameters=summary.parameter_bytes,
        buffers=summary.buffer_bytes,
        gradients=summary.gradient_bytes,
        optimizer=None if None in states else sum(state or 0 for state in states),
        activations=None if activations is None else activations * micro_batch,
    )


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the state that `optimizer` will hold after its first step.

    A copy of it over meta parameters takes that step, so that the result is exact for any
    optimizer. None for an optimizer that needs a closure or does not accept meta parameters.
    """
    try:
        copy = _meta_copy(optimizer)
        take_step(copy)
    except Exception:  # any optimizer class, on tensors that it may not support
        return None
    values = [v for state in copy.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(value.nbytes for value in values)


def _meta_copy(optimizer: Optimizer) -> Optimizer:
    known = inspect.signature(type(optimizer)).parameters
    defaults = {k: v for k, v in optimizer.defaults.items() if k in known}
    groups = [_meta_group(group) for group in optimizer.param_groups]
    return type(optimizer)(groups, **_unfused(defaults))


def _meta_group(group: dict[str, Any]) -> dict[str, Any]:
    parameters = [torch.empty_like(p, device="meta").requires_grad_() for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return _unfused(group) | {"params": parameters}


def _unfused(options: dict[str, Any]) -> dict[str, Any]:
    return options | {k: False for k in ("fused", "foreach", "capturable") if k in options}
