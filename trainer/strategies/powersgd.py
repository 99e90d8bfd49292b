"""Low-rank gradient compression by torch's PowerSGD, with a state that can be saved."""

# No `from __future__ import annotations`: torch compares the hook's annotations as types.
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from trainer import rng

logger = logging.getLogger("regimen")

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_COUNTS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


class PowerSGD:
    """Compress a wrapped model's gradients by torch's PowerSGD."""

    def __init__(self, wrapped: DistributedDataParallel, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._numbers = {id(p): number for number, p in enumerate(wrapped.parameters())}
        self._device = next(wrapped.parameters()).device
        self._buckets: list[list[int]] = []  # indices of parameters, at the last exchange
        # The hook's callbacks wait in gloo's two threads, which would have to answer them: with two
        # buckets in flight both threads would wait forever.
        self._one_at_a_time = dist.get_backend() == "gloo"
        self.forget()
        wrapped.register_comm_hook(self, _compress)

    def forget(self) -> None:
        """Reset the state, except for the known buckets."""
        self._state = PowerSGDState(process_group=None, **self._options)

    def compress(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange the gradients of a bucket."""
        if not bucket.index():
            self._buckets.clear()
        self._buckets.append([self._numbers[id(p)] for p in bucket.parameters()])
        exchanged: torch.futures.Future[torch.Tensor] = powerSGD_hook(self._state, bucket)
        if self._one_at_a_time:
            exchanged.wait()
        return exchanged

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, which is as large as its gradients, on the host."""
        return {
            "options": dict(self._options),
            "buckets": [list(numbers) for numbers in self._buckets],
            "counts": {name: getattr(self._state, name) for name in _COUNTS},
            "by_bucket": {
                name: _copied(getattr(self._state, name), torch.device("cpu"))
                for name in _BY_BUCKET
            },
            "rng": rng.capture_numpy(self._state.rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state if it was saved with the same options and the same buckets."""
        kept = any(state["by_bucket"].values())
        if state["options"] != self._options or (kept and state["buckets"] != self._buckets):
            logger.info("  strategy.comm_hook=powersgd starts anew: its options or buckets changed")
            return
        for name in _COUNTS:
            setattr(self._state, name, state["counts"][name])
        for name in _BY_BUCKET:
            setattr(self._state, name, _copied(state["by_bucket"][name], self._device))
        self._state.rng = np.random.RandomState()
        rng.restore_numpy(state["rng"], self._state.rng)


def _compress(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.compress(bucket)


def _copied(tensors: Mapping[int, torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    return {index: tensor.to(device, copy=True) for index, tensor in tensors.items()}
