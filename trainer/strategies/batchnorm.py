"""BatchNorm over the samples of all processes, for CPUs: nn.SyncBatchNorm is for GPUs only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def synchronize(model: nn.Module, group: Any, has_samples: Callable[[], bool]) -> None:
    """Let BatchNorm take mean and variance over the samples of all processes; in place.

    has_samples: whether the micro-batch of this process counts; a borrowed sample does not.
    Processes may have different numbers of samples. nn.SyncBatchNorm, which is used on GPUs, counts
    borrowed samples as well.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.forward = partial(_normalize, module, module.forward, group, has_samples)  # type: ignore[method-assign]


def _normalize(
    norm: Any,
    local_forward: Callable[[Tensor], Tensor],
    group: Any,
    has_samples: Callable[[], bool],
    input: Tensor,
) -> Tensor:
    """Normalize (N, C, ...); in training a collective. Raises ValueError for a single value."""
    if not norm.training:  # without communication: numbers of batches may differ
        return local_forward(input)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    channels = x.shape[1]
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *[1] * (x.ndim - 2)]

    # A borrowed sample has weight 0, but stays part of the graph: backward is a collective, too.
    weight = float(has_samples())
    values_per_channel = x.new_tensor([x.numel() / channels])
    own = torch.cat([values_per_channel, x.sum(dims)]) * weight
    count, sums = _AllReduceSum.apply(own, group).split([1, channels])
    # A tensor in a condition: the host waits, which costs nothing on a CPU.
    if count <= 1:
        raise ValueError("Expected more than 1 value per channel when training")
    mean = sums / count
    centered = x - mean.view(shape)
    own_squares = centered.square().sum(dims) * weight
    variance = _AllReduceSum.apply(own_squares, group) / count

    if norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:  # running statistics are then the mean over all batches
            momentum = 1 / float(norm.num_batches_tracked)
        unbiased = (variance * count / (count - 1)).detach()
        norm.running_mean.lerp_(mean.detach().to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)

    normalized = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normalized = normalized * norm.weight.view(shape) + norm.bias.view(shape)
    result: Tensor = normalized.to(input.dtype)
    return result


class _AllReduceSum(torch.autograd.Function):
    """The sum over all processes; backward sums the gradients, and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        # Every process has the same layers, so all call this in the same order.
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None]:
        return _AllReduceSum.apply(gradients[0], ctx.group), None
