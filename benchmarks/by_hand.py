"""The loop that a person writes, which ours is compared with; it imports torch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


def updates(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    clip: bool = False,
    bf16_on: str | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
    """Classify; give after each update loss, outputs, labels and, if clipped, the norm.

    bf16_on: the kind of device, for autocast to bfloat16.
    """
    cast: AbstractContextManager[object] = (
        torch.autocast(bf16_on, torch.bfloat16) if bf16_on else nullcontext()
    )
    for inputs, labels in batches:
        with cast:
            outputs = model(inputs)
            loss = cross_entropy(outputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(model.parameters(), 1.0) if clip else None
        optimizer.step()
        optimizer.zero_grad()
        yield loss, outputs, labels, norm
