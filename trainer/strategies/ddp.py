"""Distributed data parallelism: a model replica on each process, averaged gradients."""

# No `from __future__ import annotations`: torch compares the hook's annotations as types.
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer import rng
from trainer.errors import ModelError
from trainer.strategies.replicas import Processes, Replicas


def _powersgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    exchanged: torch.futures.Future[torch.Tensor] = powerSGD_hook(state, bucket)
    # Its callbacks wait in gloo's two threads, which would have to answer them: with two buckets in
    # flight both threads would wait forever.
    if dist.get_backend() == "gloo":
        exchanged.wait()
    return exchanged


logger = logging.getLogger("regimen")

# torch 2.15 renamed the argument. DDP synchronizes buffers at construction in any case.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)
_HOOKS: dict[str, Any] = {
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "powersgd": _powersgd,
}
_UNUSED = "Expected to have finished reduction in the prior iteration"


class DDP(Replicas):
    """Train with torch's DistributedDataParallel."""

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
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,  # None: where task or callbacks ask for it
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__(processes)
        self.group.recognize = self._recognize
        self.shares_buffers = broadcast_buffers
        self._comm_hook = comm_hook
        self._comm_hook_options = dict(comm_hook_options or {})
        self._options: dict[str, Any] = {
            _SYNC_BUFFERS: broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._trained: list[str] = []  # names of the trainable parameters, in DDP's order

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that averages gradients over the processes."""
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._trained:  # an evaluation, or a model without parameters
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        options = dict(self._options)
        if options["find_unused_parameters"] is None:
            options["find_unused_parameters"] = self.some_unused and not options["static_graph"]
        wrapped = DistributedDataParallel(model, device_ids=ids, **options)
        if self._comm_hook is not None:
            compresses = self._comm_hook == "powersgd"
            state = PowerSGDState(None, **self._comm_hook_options) if compresses else None
            wrapped.register_comm_hook(state, _HOOKS[self._comm_hook])
        return wrapped

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
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
            before = rng.capture()
            for _ in range(2):
                compute()
            rng.restore(before)

    def _recognize(self, error: Exception) -> Exception | None:
        """Return an error with the names of unused parameters; DDP's error has their indices."""
        if isinstance(error, RuntimeError) and _UNUSED in str(error):
            return ModelError(_unused(str(error), self._trained))
        return None


def _unused(text: str, names: list[str]) -> str:
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    numbers = [int(n) for n in found.group(1).split()] if found else []
    listed = ", ".join(names[n] for n in numbers[:8] if n < len(names))
    more = f" (+{len(numbers) - 8} more)" if len(numbers) > 8 else ""
    return (
        f"no gradient reached {listed or 'some parameters'}{more}: set "
        "strategy.find_unused_parameters=true, or freeze the parameters that the model does not use"
    )
