"""Classification: one label for each sample."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from regimen.trainer.device import count_true
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised, call_model


class Classification(Supervised):
    """Classify samples; batches are `(inputs, labels)`.

    Labels are class indices [n] or class probabilities [n, classes]. Samples whose label is the
    loss's `ignore_index` (torch's default is -100) are excluded from the loss and the scores.
    Inputs of five dimensions are views of each sample, [n, views, C, H, W], such as those of
    `transforms=ten_crop`: the logits are averaged over the views. With `average_views=False` they
    are videos or volumes, which go to the model as they are.
    """

    output_kind = "classes"

    def __init__(
        self,
        num_classes: int,
        loss: Loss | None = None,
        top_k: Sequence[int] = (1,),
        metrics: Metrics | None = None,
        average_views: bool = True,
    ) -> None:
        super().__init__(loss or nn.CrossEntropyLoss(), metrics)
        self.num_classes = num_classes
        self._average_views = average_views
        if min(top_k, default=1) < 1:
            raise ModelError("task.top_k", f"expected numbers >= 1, got {list(top_k)}")
        self._top_k = {
            "accuracy" if k == 1 else f"accuracy_top{k}": k for k in top_k if k <= num_classes
        }
        self.score_names = list(self._top_k)

    def answer(self, model: nn.Module, inputs: Any) -> Any:
        """Return the logits [n, classes]."""
        is_views = getattr(inputs, "ndim", 0) == 5  # inputs of a text are a dict, without `ndim`
        if not (is_views and self._average_views):
            return call_model(model, inputs)
        logits = call_model(model, inputs.flatten(0, 1))  # [n * views, classes]
        return logits.view(*inputs.shape[:2], -1).mean(1)

    def interpret(self, output: Tensor) -> Tensor:
        """Return the probability of each class."""
        return output.float().softmax(1)

    def shape(self, target: Tensor) -> Shape:
        """Return [n, classes]."""
        return target.shape[0], self.num_classes

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the samples whose class is among the k with the largest logits."""
        labels, count = self.losses.valid_labels(target)
        return {name: (_hits(output, labels, k), count) for name, k in self._top_k.items()}


def _hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    if k == 1:
        return count_true(logits.detach().argmax(1).eq(labels))
    top_classes = logits.detach().topk(k, dim=1).indices
    return count_true((top_classes == labels[:, None]).any(1))
