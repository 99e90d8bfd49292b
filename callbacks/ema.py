"""An exponential moving average of the weights."""

from contextlib import AbstractContextManager
from typing import Any

from torch.optim.swa_utils import get_ema_multi_avg_fn

from callbacks.support.averaging import RunningAverage
from callbacks.support.errors import CallbackError
from trainer.trainer import Trainer


class EMA(RunningAverage):
    """Keep `average = decay * average + (1 - decay) * weights`, after every applied update.

    `warmup`: the decay of step n is at most (1 + n) / (10 + n), so that the first weights do not
    dominate the average of a short run. `use_buffers`: average BatchNorm's statistics too, instead
    of copying them. `use_for_evaluation`: validation and test, and so the choice of the best
    checkpoint, use the average; training never does. A checkpoint holds both `model` and `ema`.
    """

    def __init__(
        self,
        decay: float = 0.999,
        warmup: bool = True,
        update_every: int = 1,
        use_buffers: bool = True,
        use_for_evaluation: bool = True,
    ) -> None:
        super().__init__(use_for_evaluation, use_buffers)
        if not 0 <= decay < 1:
            raise CallbackError(f"decay={decay}: choose at least 0 and less than 1")
        if update_every < 1:
            raise CallbackError(f"update_every={update_every}: choose at least 1")
        self._decay = decay
        self._warmup = warmup
        self._update_every = update_every

    def on_update_end(self, trainer: Trainer) -> None:
        """Update the average, unless the update was skipped.

        An update that a GPU skipped changes no weights, and ends the run before the average is
        used.
        """
        step = trainer.state.global_step
        if not trainer.state.skipped_in_a_row and step % self._update_every == 0:
            most = (1 + step) / (10 + step) if self._warmup else 1.0
            rule = get_ema_multi_avg_fn(min(self._decay, most))  # type: ignore[no-untyped-call]
            self.update(rule)

    def swap(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's weights."""
        self.take_buffers()  # they change between two updates of the average
        return super().swap(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the average as a state dict of the model."""
        self.take_buffers()
        return super().state_dict()
