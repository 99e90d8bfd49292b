"""BatchNorm with statistics over all processes for CPUs, which torch's does not support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from trainer.internals import BATCH_NORMS


@dataclass(slots=True)
class Share:
    """Whether this process's samples count: a process without any in a short batch borrows one."""

    counts: bool = True


class SyncBatchNorm(nn.BatchNorm1d):
    """Normalize by mean and variance over the samples of all processes (Ioffe, Szegedy 2015).

    The input is (N, C, ...), as for nn.BatchNorm1d to 3d; parameters and buffers are those of
    `norm`. Processes may have different numbers of samples. nn.SyncBatchNorm, which is used on
    GPUs, counts borrowed samples as well.
    """

    def __init__(self, norm: Any, group: dist.ProcessGroup, share: Share) -> None:
        tracks = norm.track_running_stats
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, tracks)
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(self, name, buffer)
        self.train(norm.training)
        self._group, self._share = group, share

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; in training a collective. Raises ValueError for a single value."""
        if not self.training:  # without communication: numbers of batches may differ
            mean, variance = self.running_mean, self.running_var
            parts = (self.weight, self.bias, mean is None)
            return batch_norm(input, mean, variance, *parts, eps=self.eps)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        counts = float(self._share.counts)
        # `x` is part of the graph even if it does not count: backward is a collective, too.
        own = torch.cat([x.new_tensor([x.numel() / x.shape[1]]), x.sum(dims)]) * counts
        total, sums = _Sum.apply(own, self._group).split([1, x.shape[1]])
        if total <= 1:
            raise ValueError("Expected more than 1 value per channel when training")
        mean = sums / total
        centered = x - mean.view(shape)
        squares = centered.square().sum(dims) * counts
        variance = _Sum.apply(squares, self._group) / total
        self._remember(mean, variance * total / (total - 1))
        normalized = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normalized = normalized * self.weight.view(shape)
        if self.bias is not None:
            normalized = normalized + self.bias.view(shape)
        result: Tensor = normalized.to(input.dtype)
        return result

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics; without a momentum they are the mean over all batches."""
        if self.num_batches_tracked is None or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(value.to(running.dtype), momentum)


def synchronize(module: nn.Module, group: dist.ProcessGroup, share: Share) -> nn.Module:
    """Return `module` with its BatchNorm layers replaced."""
    if isinstance(module, BATCH_NORMS):
        return SyncBatchNorm(module, group, share)
    for name, child in module.named_children():
        setattr(module, name, synchronize(child, group, share))
    return module


class _Sum(torch.autograd.Function):
    """The sum over all processes; backward sums the gradients, and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None]:
        return _Sum.apply(gradients[0], ctx.group), None
