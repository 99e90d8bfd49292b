"""Base class of tasks that predict a class at each token of a text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from regimen.trainer.tasks.supervised import Scores, Shape, Supervised, call_model


class TokenTask(Supervised):
    """Predict a class at each token; targets have shape [n, length].

    The model's output has shape [n, length, classes]. Reports `token_accuracy`, the share of tokens
    predicted correctly, of those that the loss counts.
    """

    score_names: Sequence[str] = ("token_accuracy",)

    def answer(self, model: nn.Module, inputs: Any) -> Any:
        """Return logits [n, classes, length]: torch's losses expect classes in dimension 1."""
        return call_model(model, inputs).transpose(1, 2)

    def shape(self, target: Tensor) -> Shape:
        """Return [n, classes, length]."""
        return len(target), self.num_classes, *target.shape[1:]

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the tokens whose class is predicted correctly."""
        return {"token_accuracy": self._correct(output, target)}
