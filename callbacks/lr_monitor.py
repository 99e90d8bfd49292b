"""Log the learning rate of every parameter group."""

from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer


class LRMonitor(Callback):
    """Add `lr/<group>` to every log line: the learning rate of its last update."""

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the learning rates."""
        used = trainer.optimizers.learning_rates(used=True)
        return {f"lr/{group}": lr for group, lr in used.items()}
