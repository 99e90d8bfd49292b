"""Truncated backpropagation through time: the state of the network lives longer than a batch."""

from typing import Any

from torch import Tensor, nn

from examples.word_language_model.model import Hidden
from regimen.trainer.tasks.language_model import LanguageModel


class TruncatedBPTT(LanguageModel):
    """Predict the next word; batches are `((words, column), following words)`.

    The state of each column is kept, not that of each place in a batch: so an update may be split
    into micro-batches. No gradient reaches the batch before.

    columns: the most that a data set has.
    """

    persistent = ("hidden",)

    def __init__(self, num_classes: int, columns: int) -> None:
        super().__init__(num_classes)
        self.columns = columns
        self.hidden: Hidden | None = None

    def on_epoch_start(self, epoch: int) -> None:
        """Begin the text anew."""
        self.hidden = None

    def on_evaluation_start(self, stage: str) -> None:
        """Begin the text of an evaluation."""
        self.hidden = None

    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return logits [n, words, length], and keep the state behind the words."""
        words, columns = inputs
        before = None
        if self.hidden is not None:
            state, cell = self.hidden
            before = state[:, columns], cell[:, columns]
        logits: Tensor
        logits, after = model(words, before)
        if self.hidden is None:
            self.hidden = self._zeros_like(after[0]), self._zeros_like(after[1])
        for kept, new in zip(self.hidden, after, strict=True):
            kept[:, columns] = new.detach()
        return logits.transpose(1, 2)

    def _zeros_like(self, state: Tensor) -> Tensor:
        layers, _, width = state.shape
        return state.new_zeros(layers, self.columns, width)
