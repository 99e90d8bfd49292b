"""The next token at each place of a text."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trainer.errors import ModelError
from trainer.task import Metric
from trainer.tasks.losses import Losses
from trainer.tasks.metrics import Perplexity
from trainer.tasks.supervised import Scores, Supervised


class LanguageModel(Supervised):
    """Predict tokens; batches are `(tokens, following)`, both [n, length] of token numbers.

    The model's output is [n, length, tokens]. Places whose following token is `ignore_index`
    (padding) count nowhere: the loss is the mean over the others, however an update is split.
    Gives `token_accuracy` and `perplexity`.
    """

    score_names = ("token_accuracy",)

    def __init__(
        self,
        num_classes: int,
        loss: nn.Module | Mapping[str, nn.Module | None] | None = None,
        ignore_index: int = -100,
        metrics: Mapping[str, Metric | None] | None = None,
    ) -> None:
        losses = Losses.of(loss or nn.CrossEntropyLoss(ignore_index=ignore_index))
        super().__init__(losses, {"perplexity": Perplexity(ignore_index), **(metrics or {})})
        self.num_classes = num_classes
        self._ignore_index = ignore_index

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits [n, tokens, length], the classes where torch's losses look for them."""
        logits: Tensor = model(inputs)
        return logits.transpose(1, 2)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Refuse other sizes."""
        wanted = (len(target), self.num_classes, target.shape[1])
        if output.shape != wanted:
            raise ModelError(
                f"the model's output has shape {list(output.transpose(1, -1).shape)}, but "
                f"{self.num_classes} tokens ask for [{wanted[0]}, {wanted[2]}, {wanted[1]}]"
            )

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Sum the tokens that are foretold."""
        right = output.detach().argmax(1) == target
        return {"token_accuracy": (right.sum(), (target != self._ignore_index).sum())}
