"""The origin of a non-finite update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import MicroBatch
from trainer.nested import first_tensor
from trainer.state import TrainState


def first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity."""
    for name, tensor in named:
        number = tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
        if tensor is not None and number and not torch.isfinite(tensor).all():
            return name
    return None


@dataclass(frozen=True, order=True)
class NonfiniteOrigin:
    """Where a NaN was found; a smaller distance is closer to its origin."""

    distance: int
    text: str


def explain(
    model: nn.Module,
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[Tensor],
) -> NonfiniteOrigin:
    """Name the origin of a non-finite update: a sample, a parameter, the loss or a gradient."""
    where = f"at update {state.updates + 1} (step {state.global_step + 1}, epoch {state.epoch})"
    advice = (
        "the update was not applied; lower optimizer.lr, bound it with trainer.clip_grad_norm, "
        "or leave such updates out with trainer.on_nonfinite=skip"
    )
    for micro_batch in micro_batches:
        sample = _nonfinite_sample(micro_batch)
        if sample is not None:
            return NonfiniteOrigin(0, f"sample {sample} holds NaN or infinity, {where}: {advice}")
    indices = [i for m in micro_batches for i in m.piece.indices]
    shown = f"; samples {', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''}"
    weights = first_nonfinite(model.named_parameters())
    if weights:
        return NonfiniteOrigin(1, f"parameter {weights} is not finite, {where}: {advice}")
    gradients = first_nonfinite((n, p.grad) for n, p in model.named_parameters())
    # A non-finite loss makes all gradients non-finite.
    of_loss = gradients is None or first_nonfinite(("", loss) for loss in losses) is not None
    name = "loss" if of_loss else f"gradient of {gradients}"
    place = f"{where}{shown if indices else ''}"
    return NonfiniteOrigin(2 if of_loss else 3, f"the {name} is not finite, {place}: {advice}")


def _nonfinite_sample(micro_batch: MicroBatch) -> int | None:
    tensor = first_tensor(micro_batch.batch)
    if tensor is None or not tensor.is_floating_point() or not tensor.ndim:
        return None
    bad = (~torch.isfinite(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None])).any(1)
    row = int(bad.int().argmax()) if bad.any() else None
    indices = micro_batch.piece.indices
    return None if row is None else indices[row] if row < len(indices) else row
