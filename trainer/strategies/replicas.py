"""Base class of the strategies with several processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.processes import ProcessGroup
from trainer.errors import ResourceError
from trainer.strategies.strategy import Strategy
from trainer.strategies.sync_batchnorm import Share, synchronize


@dataclass(frozen=True, slots=True)
class Processes:
    """How the processes of a run meet, and on which devices; for every strategy that has several.

    backend: None for nccl on GPUs, else gloo. timeout: seconds. numbers: of the GPUs.
    """

    backend: str | None = None
    timeout: float = 1800.0
    accelerator: str = "auto"
    numbers: Sequence[int] | None = None
    sync_batchnorm: bool = False


class Replicas(Strategy):
    """Train in several processes, each of which computes a part of every update's batch."""

    # Whether forward passes begin with the main process's buffers (BatchNorm's statistics).
    shares_buffers = False
    group: ProcessGroup

    def __init__(self, processes: Processes | None = None) -> None:
        given = processes or Processes()
        use_cuda = given.accelerator in ("auto", "cuda") and torch.cuda.is_available()
        group = ProcessGroup(given.backend or ("nccl" if use_cuda else "gloo"), given.timeout)
        super().__init__(_gpu(group.local_rank, given.numbers) if use_cuda else "cpu", group)
        self.devices = group.world_size
        self._sync_batchnorm = given.sync_batchnorm
        self._share = Share()

    @property
    def gradient_scale(self) -> float:
        """The number of processes, over which gradients are averaged."""
        return float(self.group.world_size)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device; with `sync_batchnorm` replace its BatchNorm layers."""
        if self._sync_batchnorm and self.device.type == "cpu":
            group = dist.new_group(backend="gloo", timeout=self.group.timeout)
            assert isinstance(group, dist.ProcessGroup)
            model = synchronize(model, group, self._share)
        elif self._sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return super().prepare(model)

    @contextmanager
    def accumulate(self, wrapped: nn.Module, last: bool, counts: bool = True) -> Iterator[None]:
        """Exchange gradients in the last micro-batch of an update only."""
        self._share.counts = counts
        try:
            with self._exchanging(wrapped, last):
                yield
        finally:
            self._share.counts = True

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context in which `wrapped` exchanges gradients if `last`, else keeps them."""
        return nullcontext()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate what is saved: the weights with the main process's buffers."""
        buffers = list(model.buffers())
        own = [] if self.shares_buffers else [b.clone() for b in buffers]
        for buffer in buffers:
            dist.broadcast(buffer, src=0)
        try:
            yield
        finally:
            for buffer, value in zip(buffers, own, strict=False):
                buffer.copy_(value)

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        """Return this process's buffers, if they differ between processes."""
        if self.shares_buffers:
            return {}
        return {"buffers": {name: b.cpu() for name, b in model.named_buffers()}}

    @torch.no_grad()
    def load_own_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this process's buffers."""
        for name, buffer in model.named_buffers():
            if name in state.get("buffers", {}):
                buffer.copy_(state["buffers"][name])


def _gpu(local_rank: int, numbers: Sequence[int] | None) -> torch.device:
    number, count = numbers[local_rank] if numbers else local_rank, torch.cuda.device_count()
    if number >= count:
        raise ResourceError(
            f"strategy.devices: process {local_rank} of this machine needs GPU {number}, but it has"
            f" {count}; strategy.accelerator=cpu trains on the CPU"
        )
    return torch.device("cuda", number)
