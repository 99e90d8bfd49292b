"""Language modelling: predict the next token at each position of a text."""

from torch import nn

from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import Perplexity
from regimen.trainer.tasks.supervised import Metrics
from regimen.trainer.tasks.token_task import TokenTask


class LanguageModel(TokenTask):
    """Predict the next token; batches are `(tokens, next_tokens)`, token ids of shape [n, length].

    The model's output has shape [n, length, vocabulary]. Positions whose next token is
    `ignore_index` (padding) are excluded: the loss is the mean over all other positions of an
    update, however it is split. Reports `token_accuracy` and `perplexity`.
    """

    output_kind = "text"

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
