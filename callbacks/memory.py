"""Log the peak memory of every epoch."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_MIB = 2**20


class Memory(Callback):
    """Add `memory/peak_*` to the log line that closes an epoch, in MiB.

    CUDA: what tensors took (`allocated`) and what torch held for them (`reserved`), peaks of this
    epoch. Elsewhere `rss`: the resident memory of this process, the peak of its whole life.
    """

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Begin a new peak."""
        if trainer.strategy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.device)

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the peaks at the end of an epoch, or of the run."""
        if trainer.state.position and not trainer.done:
            return {}
        device = trainer.strategy.device
        if device.type != "cuda":
            return {"memory/peak_rss_mib": peak_rss() / _MIB}
        return {
            "memory/peak_allocated_mib": torch.cuda.max_memory_allocated(device) / _MIB,
            "memory/peak_reserved_mib": torch.cuda.max_memory_reserved(device) / _MIB,
        }


def peak_rss() -> int:
    """Return the largest resident size that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
