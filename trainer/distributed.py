"""Several processes that train as one: DistributedDataParallel over nccl or gloo."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from trainer.state import TrainState
from trainer.strategy import Strategy


def is_rank() -> bool:
    """Tell whether a launcher (torchrun, or ours) started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class ProcessGroup(Strategy):
    """What strategies of several processes share: they meet, agree, add up and leave together."""

    def __init__(self, backend: str | None = None, timeout: float = 1800.0) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        use_cuda = backend != "gloo" and torch.cuda.is_available()
        super().__init__(torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"))
        self.backend = backend or ("nccl" if use_cuda else "gloo")
        self.timeout = timedelta(seconds=timeout)
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = self.devices = int(os.environ.get("WORLD_SIZE", 1))
        self._control: dist.ProcessGroup | None = None

    def setup(self) -> None:
        """Meet the other processes; keys of an attempt before a restart are not seen."""
        super().setup()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store, rank, world_size = next(rendezvous("env://", timeout=self.timeout))
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"regimen/attempt-{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        # What the hosts tell each other never waits for a device.
        control = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(control, dist.ProcessGroup)
        self._control = control

    @property
    def gradient_scale(self) -> float:
        """The number of processes: their gradients are averaged on the way."""
        return float(self.world_size)

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    def agree(self, state: TrainState) -> None:
        """Make the wish of any process to stop the wish of all, at the same update."""
        wish = torch.tensor([state.stop_reason is not None, state.stop_code])
        dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._control)
        if wish[0]:
            code = int(wish[1])
            wishes = self.gather((state.stop_reason, state.stop_code))
            reason = next(r for r, c in wishes if r is not None and c == code)
            state.stop_reason, state.stop_code = reason, code

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier(group=self._control)

    def teardown(self) -> None:
        """Leave the group; the last collective is over on every process before any leaves."""
        if dist.is_initialized():
            dist.destroy_process_group()


class DDP(ProcessGroup):
    """Train a copy of the model on each process; gradients are averaged during backward."""

    name = "ddp"
    # Evaluation uses each process's own copy: its ranks may have different numbers of batches.
    evaluates_wrapped = False

    def __init__(
        self,
        backend: str | None = None,
        timeout: float = 1800.0,
        sync_batchnorm: bool = False,
        comm_hook: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, timeout)
        self._sync_batchnorm = sync_batchnorm
        self._comm_hook = comm_hook
        self._options = options  # DistributedDataParallel's own

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model; where asked, BatchNorm takes its statistics over all processes."""
        if self._sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return super().prepare(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that averages gradients."""
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **self._options)
        if self._comm_hook is not None:
            _register_hook(wrapped, self._comm_hook)
        return wrapped

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Exchange gradients in an update's last micro-batch only."""
        return nullcontext() if last else wrapped.no_sync()  # type: ignore[operator]


def _register_hook(wrapped: DistributedDataParallel, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[
            name
        ]
        wrapped.register_comm_hook(None, hook)
