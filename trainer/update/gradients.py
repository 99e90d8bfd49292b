"""Gradients between backward and step: are they finite, and what if not; clipping and noise."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.batch import MicroBatch
from regimen.trainer.device import is_async
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.optimizers.state import can_leave_out, foreach_norm, take_step
from regimen.trainer.rng import derived_seed
from regimen.trainer.state import TrainState
from regimen.trainer.task import first_tensor

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer

LOWER = (
    "lower optimizer.lr, bound it with trainer.clip_grad_norm, or leave such updates out with "
    "trainer.on_nonfinite=skip"
)


def total_norm(parameters: Iterable[Tensor], norm_type: float, alike: bool = False) -> Tensor:
    """Return the p-norm of all gradients as one vector; a scalar tensor on their device.

    Parameters that are `alike` are not grouped by device and dtype again, which torch does in a
    tenth of a small update.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not alike or not gradients:
        return _norm(gradients, norm_type)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(foreach_norm(gradients, norm_type)), norm_type
    )
    return norm


def largest(parameters: Iterable[Tensor]) -> Tensor:
    """Return the largest entry of all parameters; NaN if any is NaN."""
    return _norm([p.detach() for p in parameters], math.inf)


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    norms = [get_total_norm(alike, norm_type) for alike in _by_mesh(tensors) or [[]]]
    # Sharded: of all ranks.
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    if len(norms) == 1:
        return norms[0]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    # No operation of torch takes tensors of several meshes, as tensor parallelism makes them.
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def clip(
    options: TrainerConfig, optimizers: Optimizers, parameters: Sequence[Tensor], norm: Tensor
) -> None:
    """Clip the gradients in place; `norm` is their norm before."""
    bound, value = options.clip_grad_norm, options.clip_grad_value
    if bound is not None and options.clip_grad_per_group:
        for group in optimizers.groups():
            members = group.options["params"]
            _clip_norm(members, bound, total_norm(members, options.clip_grad_norm_type))
    elif bound is not None:
        _clip_norm(parameters, bound, norm)
    if value is not None:
        for alike in _by_mesh(parameters):
            clip_grad_value_(alike, value)


def _clip_norm(parameters: Sequence[Tensor], bound: float, norm: Tensor) -> None:
    # torch multiplies by min(1, bound / (norm + 1e-6)); on a CPU the norm is there to be looked
    # at, and the pass over all gradients is saved when the factor is 1.
    if norm.device.type != "cpu" or bound / (norm.item() + 1e-6) < 1:
        for alike in _by_mesh(parameters):
            clip_grads_with_norm_(alike, bound, norm)


@torch.no_grad()
def add_noise(
    options: TrainerConfig, parameters: Sequence[Tensor], update: int, turn: str = ""
) -> None:
    """Add an update's noise to the gradients, drawn on their device.

    It is a function of seed and update alone: the same after a resume, and on every process.
    """
    assert options.gradient_noise is not None
    std = options.gradient_noise.std(update)
    seed = derived_seed(options.seed, "gradient noise", update, turn)
    generators = {}
    for grad in [p.grad for p in parameters if p.grad is not None]:
        device, dtype = grad.device, grad.dtype
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        drawn = torch.randn(grad.shape, generator=generators[device], dtype=dtype, device=device)
        if (mesh := getattr(grad, "device_mesh", None)) is not None:
            from torch.distributed.tensor import distribute_tensor  # takes 0.5 s, and few need it

            # Each process has drawn it in full, and takes its shard.
            places = grad.placements  # type: ignore[attr-defined]
            drawn = distribute_tensor(drawn, mesh, places, src_data_rank=None)
        grad.add_(drawn, alpha=std)


def without_effect(precision: str, options: TrainerConfig) -> list[str]:
    """Return the keys of `trainer` without effect on LBFGS, which computes gradients itself."""
    return options.idle_with_closure(precision)


class Guard:
    """Keep an update that is not finite from being applied: no parameter, buffer or state moves.

    Mostly the host reads the norm of the gradients, once an update. Where it would have to wait for
    it, the run ends with such an update anyway, and the optimizers' kernels can leave a step out,
    the device decides: after the first such update it leaves out all further ones, and `confirm`
    tells the host of them and puts everything back to what it was before the first.

    `early`: the optimizers that step before the last gradient of an update is known.
    """

    def __init__(self, trainer: Trainer, early: Sequence[Optimizer]) -> None:
        self.by_device = (
            is_async(trainer.strategy.device)
            and trainer.options.on_nonfinite == "stop"
            and not trainer.precision.scales
            and not trainer.strategy.updates_on_host
            and all(can_leave_out(o) for o in trainer.optimizers.optimizers.values())
        )
        # Lets an optimizer step; its kernel leaves the step out as for torch's GradScaler.
        self.step = self._step_unless_bad if self.by_device else take_step
        parts = [trainer.model, *trainer.task.own_modules().values()]
        self._owners = [m._buffers for part in parts for m in part.modules() if m._buffers]
        self._early = early
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._states: list[dict[Any, Any]] = []  # of each early optimizer
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []  # shape, dtype and device of each
        self._copies: list[Tensor] = []  # of all tensors of a device and dtype, as one vector
        # 0 until a norm is not finite; then 1, as the optimizers' kernels take it.
        self._bad = torch.zeros((), device=trainer.strategy.device)
        self._before: list[Tensor] = []  # what it was before each update, since `confirm`

    def remember(self) -> None:
        """Begin an update: copy what it changes before it is known to be finite.

        A forward pass writes to buffers (BatchNorm's statistics), or replaces them
        (`self.centre = new`), before a NaN is detected.
        """
        if self.by_device:
            self._before.append(self._bad)
        self.rebind_buffers()
        self._buffers = [
            (owner, name, buffer)
            for owner in self._owners
            for name, buffer in owner.items()
            # Sparse ones (a graph, say) are constants; they cannot be joined.
            if buffer is not None and buffer.numel() and buffer.layout is torch.strided
        ]
        if not self._buffers and not self._early:
            return
        states = [{p: _structure(s) for p, s in o.state.items()} for o in self._early]
        tensors = [
            *(buffer for _, _, buffer in self._buffers),
            *(p for o in self._early for group in o.param_groups for p in group["params"]),
            *(v for state in states for s in state.values() for v in _tensors(s)),
        ]
        # Of a sharded tensor, this process's part.
        tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        kinds = [_kind(tensor) for tensor in tensors]
        former = self._copies if kinds == self._kinds else []
        # State that the last update created has no copy yet: the host asks if one was left out.
        if self.by_device and self._copies and not former and self._bad.item():
            return
        self._tensors, self._states, self._kinds = tensors, states, kinds
        with torch.no_grad():
            self._copies = [torch.cat([t.reshape(-1) for t in group]) for group in _alike(tensors)]
        if self.by_device and former:
            stays = self._bad.bool()
            pairs = zip(former, self._copies, strict=True)
            self._copies = [torch.where(stays.to(old.device), old, new) for old, new in pairs]

    def refuses(self, norm: Tensor) -> bool:
        """Look at the norm of the gradients; if True, the caller ends the update by `restore`."""
        if not self.by_device:
            return not math.isfinite(norm.item())
        norm = norm.to(self._bad.device, non_blocking=True)  # without gradients it is on the host
        # 0 times infinity is NaN, which is not 0 either; a norm of any type gives a float32.
        bad = torch.add(self._bad, norm, alpha=0, out=torch.empty_like(self._bad))
        self._bad = bad.ne_(0)
        return False

    def _step_unless_bad(self, optimizer: Optimizer) -> None:
        optimizer.grad_scale, optimizer.found_inf = None, self._bad  # type: ignore[attr-defined]
        try:
            take_step(optimizer)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def rebind_buffers(self) -> None:
        """Make the known tensors the buffers again, with the values of those assigned meanwhile.

        Averages and wrappers refer to them. One of another shape or dtype replaces the known one.
        """
        for owner, name, known in self._buffers:
            new = owner.get(name)
            if new is not known and new is not None and _kind(new) == _kind(known):
                with torch.no_grad():
                    owner[name] = known.copy_(new)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was remembered; state that did not exist is dropped."""
        for owner, name, buffer in self._buffers:
            owner[name] = buffer
        for group, flat in zip(_alike(self._tensors), self._copies, strict=True):
            parts = torch.split(flat, [tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        for optimizer, states in zip(self._early, self._states, strict=False):
            optimizer.state.clear()
            optimizer.state.update({p: _structure(s) for p, s in states.items()})

    def confirm(self) -> int:
        """Return how many of the last updates, in a row, the device has left out; undo the first.

        Waits for the device, if that decides.
        """
        if not self.by_device:
            return 0
        before = self._before
        self._before = []
        if not self._bad.item():
            return 0
        skipped = int(torch.stack(before).sum().item()) + 1
        self.restore()
        self._bad = torch.zeros_like(self._bad)
        return skipped


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _tensors(values: Any) -> list[Tensor]:
    every = values.values() if isinstance(values, Mapping) else ()
    return [value for value in every if isinstance(value, Tensor)]


def _structure(values: Any) -> Any:
    # One parameter's state: its tensors themselves, copies of all other values.
    return copy.deepcopy(values, {id(tensor): tensor for tensor in _tensors(values)})


def explain(
    model: nn.Module,
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[Tensor],
) -> tuple[int, str]:
    """Name the origin of a non-finite update: a sample (or its row), the loss or a gradient.

    With its distance from the origin: of several processes the one that is closest tells it.
    """
    where = f"at update {state.updates + 1} (step {state.global_step + 1}, epoch {state.epoch})"
    advice = f"the update was not applied; {LOWER}"
    for micro_batch in micro_batches:
        inputs, indices = first_tensor(micro_batch.batch), micro_batch.batch_slice.indices
        if inputs is not None and inputs.ndim and (bad := _nonfinite(inputs)).any():
            row = int(bad.reshape(len(bad), -1).any(1).int().argmax())
            if row < len(indices):
                what = f"sample {indices[row]}"
            else:  # of the whole update, where it is split
                what = f"row {micro_batch.batch_slice.start + row} of the batch"
            return 0, f"{what} holds NaN or infinity, {where}: {advice}"
    grads = ((name, p.grad) for name, p in model.named_parameters())
    name = next((name for name, grad in grads if grad is not None and _nonfinite(grad).any()), "")
    # A non-finite loss makes all gradients non-finite.
    of_loss = not name or any(_nonfinite(loss).any() for loss in losses)
    what = "loss" if of_loss else f"gradient of {name}"
    seen = [str(i) for m in micro_batches for i in m.batch_slice.indices]
    shown = f"; samples {', '.join(seen[:8])}{', ...' if len(seen) > 8 else ''}" if seen else ""
    return 1 if of_loss else 2, f"the {what} is not finite, {where}{shown}: {advice}"


def _nonfinite(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor)
