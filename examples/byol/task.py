"""The loss of BYOL, and the callback that moves its target after each update."""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from regimen import Callback, StepOutput, Task
from regimen.trainer.trainer import Trainer


class BootstrapYourOwnLatent(Task):
    """Predict the target's projection of one view from the other view, both ways."""

    def monitor(self) -> None:
        """Return that the newest checkpoint is the best: a lower loss is no better network."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss of each image [n] (equation 2 of the paper, symmetrized)."""
        first, second = batch
        return StepOutput(_distance(*model(first, second)) + _distance(*model(second, first)))


def _distance(predicted: Tensor, projected: Tensor) -> Tensor:
    return 2 - 2 * cosine_similarity(predicted, projected)


class MovingTarget(Callback):
    """Let the target follow the online network after each update that was applied."""

    def __init__(self, decay: float = 0.99) -> None:
        """`decay`: at the start; it rises to 1 at the end of the run by half a cosine."""
        self._decay = decay

    def on_update_end(self, trainer: Trainer) -> None:
        """Move the target; the weights of a skipped update are those of before."""
        state = trainer.state
        if not state.skipped_in_a_row:
            share = state.global_step / (trainer.total_steps or state.global_step)
            decay = 1 - (1 - self._decay) * (math.cos(math.pi * share) + 1) / 2
            trainer.model.move_target(decay)  # type: ignore[operator]
