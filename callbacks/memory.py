"""Log the peak memory of every epoch."""

from regimen.trainer.callback import Callback
from regimen.trainer.device import counts_memory, peak_rss, peaks, reset_peaks
from regimen.trainer.trainer import Trainer

_MIB = 2**20


class Memory(Callback):
    """Add `memory/peak_*` to the last log line of an epoch, in MiB.

    On an accelerator these are the peaks of the epoch: the memory of tensors (`allocated`) and of
    torch's caching allocator (`reserved`). Where torch counts none, `rss` is the peak
    resident memory of this process since its start.
    """

    affects_result = False

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Reset the peaks."""
        if counts_memory(trainer.strategy.device):
            reset_peaks(trainer.strategy.device)

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the peaks at the end of an epoch, or of the run."""
        if trainer.state.position and not trainer.done:
            return {}
        device = trainer.strategy.device
        if counts_memory(device):
            sizes = peaks(device)
        else:
            sizes = {"rss": peak_rss()}
        return {f"memory/peak_{name}_mib": size / _MIB for name, size in sizes.items()}
