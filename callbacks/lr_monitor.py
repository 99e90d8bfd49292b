"""Log the learning rate of every parameter group."""

from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer


class LRMonitor(Callback):
    """Add `lr/<group>` to every log line: the learning rate of its last update."""

    affects_result = False

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the learning rates."""
        rates = trainer.optimizers.learning_rates(used=True)
        return {f"lr/{group}": rate for group, rate in rates.items()}
