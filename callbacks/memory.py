"""Log the peak memory of every epoch."""

import resource
import sys

import torch

from trainer.callback import Callback
from trainer.trainer import Trainer

_MIB = 2**20


class Memory(Callback):
    """Add `memory/peak_*` to the last log line of an epoch, in MiB.

    With CUDA these are the peaks of the epoch: the memory of tensors (`allocated`) and of torch's
    caching allocator (`reserved`). Otherwise `rss` is the peak resident memory of this process
    since its start.
    """

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Reset the peaks."""
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
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
