"""Gradients between backward and step: their norm, clipping, noise, and where a NaN comes from."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.batch import MicroBatch
from regimen.trainer import fast
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.rng import derived_seed
from regimen.trainer.state import TrainState
from regimen.trainer.task import first_tensor

ADVICE = (
    "lower optimizer.lr, bound it with trainer.clip_grad_norm, or leave such updates out with "
    "trainer.on_nonfinite=skip"
)
_MOST_SAMPLES = 8  # that a message names


def total_norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all gradients as one vector; a scalar tensor on their device.

    Of sharded parameters the norm over the shards of all processes: a collective.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if fast.is_uniform(gradients):
        return fast.uniform_norm(gradients, norm_type)
    return _norm(gradients, norm_type)


def largest_entry(parameters: Iterable[Tensor]) -> Tensor:
    """Return the largest absolute value of all parameters; NaN if any is NaN."""
    return _norm([p.detach() for p in parameters], math.inf)


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    norms = []
    for group in _by_mesh(tensors) or [[]]:
        norm = get_total_norm(group, norm_type)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # a collective: the norm over the shards of all processes
        norms.append(norm)
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
    max_norm = options.clip_grad_norm
    if max_norm is not None and options.clip_grad_per_group:
        for param_group in optimizers.groups():
            members = param_group.options["params"]
            _clip_norm(members, max_norm, total_norm(members, options.clip_grad_norm_type))
    elif max_norm is not None:
        _clip_norm(parameters, max_norm, norm)
    if options.clip_grad_value is not None:
        limit = options.clip_grad_value
        for group in _by_mesh(parameters):
            clip_grad_value_([p for p in group if not _has_sparse_gradient(p)], limit)
            for parameter in filter(_has_sparse_gradient, group):
                # Of rows that several samples read, the sum is clipped, as in a dense gradient.
                parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
                parameter.grad.values().clamp_(-limit, limit)


def _has_sparse_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _clip_norm(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    # torch multiplies by min(1, max_norm / (norm + 1e-6)). On a CPU reading the norm waits for
    # nothing, and the pass over all gradients is saved when the factor is 1.
    if norm.device.type == "cpu" and max_norm / (norm.item() + 1e-6) >= 1:
        return
    for group in _by_mesh(parameters):
        clip_grads_with_norm_(group, max_norm, norm)


@torch.no_grad()
def add_noise(
    options: TrainerConfig, parameters: Sequence[Tensor], update: int, phase: str = ""
) -> None:
    """Add an update's noise to the gradients, drawn on their device.

    It is a function of seed and update alone: the same after a resume, and on every process.
    """
    assert options.gradient_noise is not None
    std = options.gradient_noise.std(update)
    seed = derived_seed(options.seed, "gradient noise", update, phase)
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        device = gradient.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(
            gradient.shape, generator=generators[device], dtype=gradient.dtype, device=device
        )
        mesh = getattr(gradient, "device_mesh", None)
        if mesh is not None:
            from torch.distributed.tensor import distribute_tensor  # takes 0.5 s, and few need it

            # Each process has drawn the whole tensor, and takes its shard.
            placements = gradient.placements  # type: ignore[attr-defined]
            noise = distribute_tensor(noise, mesh, placements, src_data_rank=None)
        gradient.add_(noise, alpha=std)


def explain_nonfinite(
    model: nn.Module,
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[Tensor],
) -> tuple[int, str]:
    """Return (distance, message) about the origin of a non-finite update on this process. Waits.

    The distance is 0 for a sample that holds NaN, 1 for the loss, 2 for a gradient: of several
    processes, the one with the smallest has the cause, and the others have its effects.
    """
    where = f"at update {state.updates + 1} (step {state.global_step + 1}, epoch {state.epoch})"
    advice = f"the update was not applied; {ADVICE}"

    sample = _find_nonfinite_sample(micro_batches)
    if sample is not None:
        return 0, f"{sample} holds NaN or infinity, {where}: {advice}"

    samples = _describe_samples(micro_batches)
    parameter = _find_nonfinite_gradient(model)
    # A non-finite loss makes all gradients non-finite: then the gradient is not the origin.
    if parameter is None or any(_is_nonfinite(loss).any() for loss in losses):
        return 1, f"the loss is not finite, {where}{samples}: {advice}"
    return 2, f"the gradient of {parameter} is not finite, {where}{samples}: {advice}"


def _find_nonfinite_sample(micro_batches: Sequence[MicroBatch]) -> str | None:
    """Describe the first sample whose input holds NaN: by its index, or its row if it has none."""
    for micro_batch in micro_batches:
        inputs = first_tensor(micro_batch.batch)
        if inputs is None or inputs.ndim == 0:
            continue
        is_bad = _is_nonfinite(inputs)
        if not is_bad.any():
            continue
        bad_rows = is_bad.reshape(len(is_bad), -1).any(1)
        row = int(bad_rows.int().argmax())
        batch_slice = micro_batch.batch_slice
        if row < len(batch_slice.indices):
            return f"sample {batch_slice.indices[row]}"
        # The row of the whole batch, of which this is a part.
        return f"row {batch_slice.start + row} of the batch"
    return None


def _find_nonfinite_gradient(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and _is_nonfinite(parameter.grad).any():
            return name
    return None


def _describe_samples(micro_batches: Sequence[MicroBatch]) -> str:
    indices = [str(i) for m in micro_batches for i in m.batch_slice.indices]
    if not indices:
        return ""
    shortened = ", ..." if len(indices) > _MOST_SAMPLES else ""
    return f"; samples {', '.join(indices[:_MOST_SAMPLES])}{shortened}"


def _is_nonfinite(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:  # a gradient of an embedding: what is not stored is 0
        tensor = tensor.coalesce().values()
    return ~torch.isfinite(tensor)
