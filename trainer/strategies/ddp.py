"""Distributed data parallelism: a model replica on each process, averaged gradients."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer import rng
from trainer.errors import ModelError
from trainer.strategies.powersgd import PowerSGD
from trainer.strategies.replicas import Processes, Replicas

# torch 2.15 renamed the argument. DDP synchronizes buffers at construction in any case.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)
_HOOKS = {
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
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
        self._powersgd: PowerSGD | None = None

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
        if self._comm_hook == "powersgd":
            self._powersgd = PowerSGD(wrapped, self._comm_hook_options)
        elif self._comm_hook is not None:
            wrapped.register_comm_hook(None, _HOOKS[self._comm_hook])
        return wrapped

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return wrapped.no_sync()

    def warm_up(self, wrapped: nn.Module, compute: Callable[[], None]) -> None:
        """Let DDP rebuild its buckets before the state is loaded, as it had when it was saved.

        DDP orders the buckets by the first backward pass and uses them from the second forward pass
        on. The rounding of sums over three or more processes depends on the position of a gradient
        in its bucket, and so does PowerSGD's state. Only the order remains: `compute` drops
        gradients and restores buffers, and the random state is restored here.
        """
        if self.group.world_size < 3 and self._powersgd is None:
            return
        before = rng.capture()
        for _ in range(2):
            compute()
        rng.restore(before)
        if self._powersgd is not None:
            self._powersgd.forget()

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of this process alone: its buffers, and PowerSGD's error feedback."""
        state = super().own_state(model)
        if self._powersgd is not None:
            state["powersgd"] = self._powersgd.state_dict()
        return state

    def load_own_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what `own_state` returned."""
        super().load_own_state(model, state)
        if self._powersgd is not None and "powersgd" in state:
            self._powersgd.load_state_dict(state["powersgd"])

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
