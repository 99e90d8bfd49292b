"""Log the learning rate of every parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class LRMonitor(Callback):
    """Add `lr/<group>` to every log line: the learning rate of its last update."""

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the learning rates."""
        used = trainer.optimizers.learning_rates(used=True)
        return {f"lr/{group}": lr for group, lr in used.items()}
