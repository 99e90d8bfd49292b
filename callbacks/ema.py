"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from callbacks.support.averaging import WeightAverage
from callbacks.support.errors import CallbackError
from trainer.callback import Average

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class EMA(Average):
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
        if not 0 <= decay < 1:
            raise CallbackError(f"decay={decay}: choose at least 0 and less than 1")
        if update_every < 1:
            raise CallbackError(f"update_every={update_every}: choose at least 1")
        self._decay = decay
        self._warmup = warmup
        self._update_every = update_every
        self.used_for_evaluation = use_for_evaluation
        self._average = WeightAverage(use_buffers)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start from the model's weights, or continue a loaded average."""
        self._average.begin(trainer.model)

    def on_update_end(self, trainer: Trainer) -> None:
        """Update the average, unless the update was skipped.

        An update that a GPU skipped changes no weights, and ends the run before the average is
        used.
        """
        state = trainer.state
        if state.skipped_in_a_row or state.global_step % self._update_every:
            return
        self._average.update(1 - self.decay(state.global_step))

    def decay(self, step: int) -> float:
        """Return the decay of the update with which `global_step` becomes `step`."""
        return min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay

    def swap(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's weights."""
        # The copied buffers change between two updates of the average.
        self._average.take_buffers()
        return self._average.exchanged(trainer.model) if self.used_for_evaluation else nullcontext()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's tensors themselves."""
        return self._average.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the average as a state dict of the model."""
        self._average.take_buffers()
        return {"model": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an average."""
        self._average.load_state_dict(state["model"])
