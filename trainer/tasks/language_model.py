"""Language modelling: predict the next token at each position of a text."""

from typing import Any

from torch import Tensor, nn

from regimen.trainer.device import count_true
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import Perplexity
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised, call_model


class LanguageModel(Supervised):
    """Predict the next token; batches are `(tokens, next_tokens)`, token ids of shape [n, length].

    The model's output has shape [n, length, vocabulary]. Positions whose next token is
    `ignore_index` (padding) are excluded: the loss is the mean over all other positions of an
    update, however it is split. Reports `token_accuracy` and `perplexity`.
    """

    output_kind = "text"
    score_names = ("token_accuracy",)

    def __init__(
        self,
        num_classes: int,
        loss: Loss | None = None,
        ignore_index: int = -100,
        metrics: Metrics | None = None,
    ) -> None:
        loss = loss or nn.CrossEntropyLoss(ignore_index=ignore_index)
        perplexity = Perplexity(ignore_index)
        super().__init__(loss, metrics, ignore_index=ignore_index, perplexity=perplexity)
        self.num_classes = num_classes

    def answer(self, model: nn.Module, inputs: Any) -> Any:
        """Return logits [n, vocabulary, length]: torch's losses expect classes in dimension 1."""
        return call_model(model, inputs).transpose(1, 2)

    def shape(self, target: Tensor) -> Shape:
        """Return [n, vocabulary, length]."""
        return len(target), self.num_classes, *target.shape[1:]

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the tokens that are predicted correctly."""
        labels, count = self.losses.valid_labels(target)
        correct = count_true(output.detach().argmax(1) == labels)
        return {"token_accuracy": (correct, count)}
