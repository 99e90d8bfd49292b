"""Several processes, each with the whole model: DistributedDataParallel."""

# No `from __future__ import annotations`: torch compares the hook's annotations as types.
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regimen.conf.errors import Problem, truncated_list
from regimen.trainer import rng
from regimen.trainer.device import is_async
from regimen.trainer.errors import ModelError
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.strategy import NULL_CONTEXT, Devices

logger = logging.getLogger("regimen")


def _powersgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    exchanged = powerSGD_hook(state, bucket)
    # The callbacks of its futures wait for collectives, in gloo's two threads, which would have to
    # carry these out: with two buckets in flight both threads would wait forever.
    if dist.get_backend() == "gloo":
        exchanged.wait()
    return exchanged


_COMM_HOOKS: dict[str, Any] = {
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "powersgd": _powersgd,
}
# How DDP begins the error for parameters that got no gradient in the update before.
_UNUSED = "Expected to have finished reduction in the prior iteration"


class DDP(MultiProcess):
    """Train with torch's DistributedDataParallel.

    find_unused_parameters: None finds them if the task or a callback needs it. comm_hook:
    compresses gradients in their exchange, with `comm_hook_options` as the state of powersgd.
    """

    name = "ddp"
    # Evaluation calls the unwrapped replica: processes may have different numbers of batches.
    evaluates_wrapped = False

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        backend: str = "auto",
        timeout: float = 1800.0,
        max_restarts: int = 0,
        sync_batchnorm: bool = False,
        comm_hook: str | None = None,
        comm_hook_options: Mapping[str, Any] = MappingProxyType({}),
        broadcast_buffers: bool = True,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            devices=devices,
            backend=backend,
            timeout=timeout,
            max_restarts=max_restarts,
            sync_batchnorm=sync_batchnorm,
        )
        self.group.translate_error = self._name_unused_parameters
        self.shares_buffers = broadcast_buffers
        self._comm_hook = comm_hook
        self._comm_hook_options = dict(comm_hook_options)
        self._find_unused = find_unused_parameters
        self._static_graph = static_graph
        self._options: dict[str, Any] = {
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._trainable = list[str]()  # names of the trainable parameters, in DDP's order

    @classmethod
    def problems(
        cls,
        *,
        comm_hook: str | None = None,
        comm_hook_options: Mapping[str, Any] = MappingProxyType({}),
        **others: Any,
    ) -> Iterable[Problem]:
        """Return whether device, backend and hook exist, and powersgd takes its options."""
        yield from super().problems(**others)
        if comm_hook not in (None, *_COMM_HOOKS):
            hint = f"there are {', '.join(_COMM_HOOKS)}"
            yield Problem("strategy.comm_hook", f"there is no {comm_hook!r}", hint)
        if comm_hook == "powersgd":  # torch would see them once all processes have met
            try:
                PowerSGDState(process_group=None, **comm_hook_options)
            except (TypeError, ValueError) as error:
                yield Problem("strategy.comm_hook_options", str(error))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that averages gradients over the processes."""
        self._trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._trainable:  # an evaluation, or a model without parameters
            return model
        device_ids = [self.device.index] if is_async(self.device) else None
        find_unused = self._find_unused
        if find_unused is None:
            find_unused = self.has_unused_parameters and not self._static_graph
        options = {**self._options, "find_unused_parameters": find_unused}
        # By position: some versions of torch rename `broadcast_buffers`. DDP synchronizes buffers
        # at construction in any case.
        wrapped = DistributedDataParallel(
            model, device_ids, None, 0, self.shares_buffers, **options
        )
        if self._comm_hook is not None:
            state = None
            if self._comm_hook == "powersgd":
                state = PowerSGDState(None, **self._comm_hook_options)
            wrapped.register_comm_hook(state, _COMM_HOOKS[self._comm_hook])
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

    def _name_unused_parameters(self, error: Exception) -> Exception | None:
        """Return an error with the names of unused parameters; DDP's error has their indices."""
        text = str(error)
        if not isinstance(error, RuntimeError) or _UNUSED not in text:
            return None
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        names = []
        if indices is not None:
            names = [self._trainable[int(index)] for index in indices.group(1).split()]
        return ModelError(
            f"no gradient reached {truncated_list(names) or 'some parameters'}: set "
            "strategy.find_unused_parameters=true, or freeze those that the model does not use"
        )
