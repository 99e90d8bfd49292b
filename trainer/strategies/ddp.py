"""Several processes with a replica each: their base, DistributedDataParallel, BatchNorm on CPUs."""

# No `from __future__ import annotations`: torch compares the hook's annotations as types.
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regimen.conf.errors import truncated_list
from regimen.trainer import rng
from regimen.trainer.device import (
    backend_of,
    default_device,
    device_count,
    device_types,
    is_async,
    supports_collectives,
)
from regimen.trainer.distributed import Group
from regimen.trainer.errors import ModelError, ResourceError
from regimen.trainer.strategies.strategy import NULL_CONTEXT, Strategy, check_backend

logger = logging.getLogger("regimen")


@dataclass(frozen=True, slots=True)
class Processes:
    """How the processes of a run meet, and on which devices; for every strategy that has several.

    backend: None for the device's own. timeout: seconds. numbers: of the devices.
    """

    backend: str | None = None
    timeout: float = 1800.0
    accelerator: str = "auto"
    numbers: Sequence[int] | None = None
    sync_batchnorm: bool = False


class Replicas(Strategy):
    """Train in several processes, each of which computes a part of every update's batch."""

    shares_buffers = False

    def __init__(self, processes: Processes | None = None) -> None:
        given = processes or Processes()
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        place = _place(given, local_rank)
        group = Group(given.backend or backend_of(place), given.timeout)
        super().__init__(place, group)
        self.devices = group.world_size
        self.gradient_scale = float(group.world_size)  # over which gradients are averaged
        self._sync_batchnorm = given.sync_batchnorm
        self.counts = True  # whether this process's samples do: one without any borrows one

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device; with `sync_batchnorm` replace its BatchNorm layers."""
        if self._sync_batchnorm and self.device.type == "cpu":
            group = self.group.data or dist.new_group(backend="gloo", timeout=self.group.timeout)
            synchronize(model, group, lambda: self.counts)
        elif self._sync_batchnorm:
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model = convert(model, self.group.data)
        return super().prepare(model)

    @contextmanager
    def accumulate(self, wrapped: nn.Module, last: bool, counts: bool = True) -> Iterator[None]:
        """Exchange gradients in the last micro-batch of an update only."""
        self.counts = counts
        try:
            with self._exchanging(wrapped, last):
                yield
        finally:
            self.counts = True

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context in which `wrapped` exchanges gradients if `last`, else keeps them."""
        return NULL_CONTEXT

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate what is saved: the weights with the main process's buffers."""
        own = [(buffer, buffer.clone()) for buffer in model.buffers()]
        for buffer, _ in own:
            dist.broadcast(buffer, src=0)
        try:
            yield
        finally:
            for buffer, value in own:
                buffer.copy_(value)


def _place(given: Processes, local_rank: int) -> torch.device:
    there = device_count(given.accelerator)
    check_backend(given.accelerator, given.backend)
    if not there or not supports_collectives(default_device(), given.backend):
        return torch.device("cpu")
    number = given.numbers[local_rank] if given.numbers else local_rank
    if number >= there:
        raise ResourceError(
            f"strategy.devices: process {local_rank} of this machine needs "
            f"{device_types()[0]}:{number}, "
            f"but it has {there}; strategy.accelerator=cpu trains on the CPU"
        )
    return torch.device(device_types()[0], number)


def _powersgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    exchanged = powerSGD_hook(state, bucket)
    # Its callbacks wait in gloo's two threads, which would have to answer them: with two buckets in
    # flight both threads would wait forever.
    if dist.get_backend() == "gloo":
        exchanged.wait()
    return exchanged


_HOOKS: dict[str, Any] = {
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "powersgd": _powersgd,
}
_UNUSED = "Expected to have finished reduction in the prior iteration"


class DDP(Replicas):
    """Train with torch's DistributedDataParallel; `options` are further arguments of its own.

    Parameters without a gradient are looked for where task or callbacks ask for it, or as
    `find_unused_parameters` says.
    """

    name = "ddp"
    # Evaluation calls the unwrapped replica: processes may have different numbers of batches.
    evaluates_wrapped = False

    def __init__(
        self,
        processes: Processes | None = None,
        *,
        comm_hook: str | None = None,
        comm_hook_options: Mapping[str, Any] | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(processes)
        self.group.recognize = self._recognize
        self.shares_buffers = broadcast_buffers
        self._comm_hook = comm_hook
        self._comm_hook_options = dict(comm_hook_options or {})
        self._unused = find_unused_parameters
        self._options = {"gradient_as_bucket_view": True, **options}
        self._trained = list[str]()  # names of the trainable parameters, in DDP's order

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that averages gradients over the processes."""
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._trained:  # an evaluation, or a model without parameters
            return model
        ids = [self.device.index] if is_async(self.device) else None
        unused = self._unused
        if unused is None:
            unused = self.some_unused and not self._options.get("static_graph")
        options = {**self._options, "find_unused_parameters": unused}
        # By position: some versions of torch rename `broadcast_buffers`. DDP synchronizes buffers
        # at construction in any case.
        wrapped = DistributedDataParallel(model, ids, None, 0, self.shares_buffers, **options)
        if self._comm_hook is not None:
            compresses = self._comm_hook == "powersgd"
            state = PowerSGDState(None, **self._comm_hook_options) if compresses else None
            wrapped.register_comm_hook(state, _HOOKS[self._comm_hook])
        return wrapped

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(wrapped, DistributedDataParallel):
            return NULL_CONTEXT
        return wrapped.no_sync()

    def warm_up(self, wrapped: nn.Module, compute: Callable[[], None]) -> None:
        """Let DDP rebuild its buckets before the state is loaded, as it had when it was saved.

        DDP orders the buckets by the first backward pass and uses them from the second forward pass
        on. The rounding of sums over three or more processes depends on the position of a gradient
        in its bucket. Only the order remains: `compute` drops gradients and restores buffers, and
        the random state is restored here.
        """
        if self._comm_hook == "powersgd":  # the dropped gradients would become part of its state
            logger.info("  strategy.comm_hook=powersgd starts anew: its state is not saved")
        elif self.group.world_size > 2:
            with rng.seeded(self.device):
                for _ in range(2):
                    compute()

    def _recognize(self, error: Exception) -> Exception | None:
        """Return an error with the names of unused parameters; DDP's error has their indices."""
        text = str(error)
        if not isinstance(error, RuntimeError) or _UNUSED not in text:
            return None
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        names = [self._trained[int(n)] for n in found.group(1).split()] if found else []
        return ModelError(
            f"no gradient reached {truncated_list(names) or 'some parameters'}: set "
            "strategy.find_unused_parameters=true, or freeze those that the model does not use"
        )


def synchronize(model: nn.Module, group: Any, counts: Callable[[], bool]) -> None:
    """Let BatchNorm take mean and variance over the samples of all processes; in place.

    This process's take part while `counts()`. Processes may have different numbers of samples.
    nn.SyncBatchNorm, which is used on GPUs, counts borrowed samples as well.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.forward = partial(_normalize, module, module.forward, group, counts)  # type: ignore[method-assign]


def _normalize(
    norm: Any,
    plain: Callable[[Tensor], Tensor],
    group: Any,
    counts: Callable[[], bool],
    input: Tensor,
) -> Tensor:
    """Normalize (N, C, ...); in training a collective. Raises ValueError for a single value."""
    if not norm.training:  # without communication: numbers of batches may differ
        return plain(input)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    weight = float(counts())
    # `x` is part of the graph even if it does not count: backward is a collective, too.
    own = torch.cat([x.new_tensor([x.numel() / x.shape[1]]), x.sum(dims)]) * weight
    total, sums = _Sum.apply(own, group).split([1, x.shape[1]])
    if total <= 1:
        raise ValueError("Expected more than 1 value per channel when training")
    mean = sums / total
    centered = x - mean.view(shape)
    variance = _Sum.apply(centered.square().sum(dims) * weight, group) / total
    if norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        # Without a momentum they are the mean over all batches.
        momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        unbiased = (variance * total / (total - 1)).detach()
        norm.running_mean.lerp_(mean.detach().to(norm.running_mean.dtype), momentum)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    normalized = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normalized = normalized * norm.weight.view(shape) + norm.bias.view(shape)
    result: Tensor = normalized.to(input.dtype)
    return result


class _Sum(torch.autograd.Function):
    """The sum over all processes; backward sums the gradients, and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None]:
        return _Sum.apply(gradients[0], ctx.group), None
