"""Updates that are not finite are not applied: to parameters, buffers or optimizer state (I6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.batch import MicroBatch, first_tensor
from trainer.state import TrainState


class Guard:
    """Undo on the device what a non-finite update did, without asking the host.

    A forward pass writes to buffers (BatchNorm's statistics) before anyone knows of the NaN, so
    these are remembered before each update.
    """

    def __init__(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        slots = _slots(parts)
        self._slots = [(owner, name) for owner, name, _ in slots]
        self._buffers = [buffer for _, _, buffer in slots]
        self._copies = [b.detach().clone() for b in self._buffers]
        self.skipped = torch.zeros((), device=device)  # since `take_skipped`

    def remember(self) -> None:
        """Keep the buffers as they are before an update."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    @torch.no_grad()
    def settle(self) -> None:
        """Have the tensors that were buffers at the start be them again, with the values of now.

        A module that assigns (`self.centre = new`) leaves averages, wrappers and this guard with
        the old one. What has another shape or format than before is taken as it is.
        """
        for i, (owner, name) in enumerate(self._slots):
            now, known = owner._buffers.get(name), self._buffers[i]
            if now is known or now is None:
                continue
            if now.shape == known.shape and now.dtype == known.dtype:
                known.copy_(now)
                owner._buffers[name] = known
            else:
                self._buffers[i], self._copies[i] = now, now.detach().clone()

    def restore(self) -> None:
        """Put the remembered buffers back."""
        for (owner, name), buffer in zip(self._slots, self._buffers, strict=True):
            owner._buffers[name] = buffer
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)

    def step(self, optimizers: Iterable[Optimizer], norm: Tensor) -> None:
        """Step where `norm` is finite; else leave everything as it was. No host sync."""
        bad = (~torch.isfinite(norm)).float().reshape(())
        for optimizer in optimizers:
            step_unless(bad, optimizer)
        self.settle()
        _select(bad, self._buffers, self._copies)
        self.skipped += bad

    def take_skipped(self) -> int:
        """Return how many updates `step` left out since the last call; waits for the device."""
        count = int(self.skipped.item())
        self.skipped.zero_()
        return count


def _slots(parts: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return each buffer that holds anything once, and where it is registered."""
    found = {
        id(buffer): (module, name, buffer)
        for part in parts
        for module in part.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel()
    }
    return list(found.values())


def step_unless(bad: Tensor, optimizer: Optimizer) -> None:
    """Step `optimizer` if the scalar `bad` is 0, decided on the device.

    A fused optimizer does so in its kernel; any other's parameters and state are copied and put
    back, which costs their size in memory.
    """
    # torch's fused SGD leaves its momentum uninitialised if the step that makes it is left out.
    begun = all(p in optimizer.state for p in _parameters(optimizer) if p.grad is not None)
    if begun and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, bad  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    before = _tensors(optimizer)
    copies = [t.detach().clone() for t in before]
    optimizer.step()
    known = {id(t) for t in before}
    fresh = [t for t in _tensors(optimizer) if id(t) not in known]
    _select(bad, before, copies)
    # State made by this very step: torch's optimizers all begin with zeros.
    _select(bad, fresh, [torch.zeros_like(t) for t in fresh])


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*_parameters(optimizer), *states]


@torch.no_grad()
def _select(bad: Tensor, current: Sequence[Tensor], former: Sequence[Tensor]) -> None:
    for now, then in zip(current, former, strict=True):
        torch.where(bad.to(now.device).bool(), then, now, out=now.detach())


def first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity."""
    for name, tensor in named:
        number = tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
        if tensor is not None and number and not torch.isfinite(tensor).all():
            return name
    return None


@dataclass(frozen=True, order=True)
class Finding:
    """Where a NaN was found; the smaller, the closer to its origin."""

    distance: int
    text: str


def explain(
    model: nn.Module, state: TrainState, micro_batches: Sequence[MicroBatch], batches: Sequence[Any]
) -> Finding:
    """Name the origin of a non-finite gradient: a sample, a parameter, or the loss."""
    where = f"at update {state.updates + 1} (step {state.global_step + 1}, epoch {state.epoch})"
    advice = (
        "the update was not applied; lower optimizer.lr, bound it with trainer.clip_grad_norm, "
        "or leave such updates out with trainer.on_nonfinite=skip"
    )
    for micro_batch, batch in zip(micro_batches, batches, strict=True):
        sample = _nonfinite_sample(micro_batch, batch)
        if sample is not None:
            return Finding(0, f"sample {sample} holds NaN or infinity, {where}: {advice}")
    indices = [i for m in micro_batches for i in m.piece.indices]
    shown = f"; samples {', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''}"
    weights = first_nonfinite(model.named_parameters())
    if weights:
        return Finding(1, f"parameter {weights} is not finite, {where}: {advice}")
    gradients = first_nonfinite((n, p.grad) for n, p in model.named_parameters())
    name = f"gradient of {gradients}" if gradients else "loss"
    return Finding(2, f"the {name} is not finite, {where}{shown if indices else ''}: {advice}")


def _nonfinite_sample(micro_batch: MicroBatch, batch: Any) -> int | None:
    tensor = first_tensor(batch)
    if tensor is None or not tensor.is_floating_point() or not tensor.ndim:
        return None
    bad = (~torch.isfinite(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None])).any(1)
    row = int(bad.int().argmax()) if bad.any() else None
    indices = micro_batch.piece.indices
    return None if row is None else indices[row] if row < len(indices) else row
