"""Multi-label classification: any number of labels for each sample."""

from torch import Tensor, nn

from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import MicroF1
from regimen.trainer.tasks.supervised import Metrics, Scores, Shape, Supervised


class MultiLabel(Supervised):
    """Predict each label; batches are `(inputs, targets)`, targets [n, labels] of 0 and 1.

    Reports `label_accuracy`, the share of labels that are predicted correctly, `exact_match`, the
    share of samples with all labels correct, and the micro-averaged `f1`. A label is predicted
    where its probability is above `threshold`.
    """

    output_kind = "labels"
    score_names = ("label_accuracy", "exact_match")

    def __init__(
        self, loss: Loss | None = None, threshold: float = 0.5, metrics: Metrics | None = None
    ) -> None:
        if not 0 < threshold < 1:
            raise ModelError(
                "task.threshold", f"expected a probability, > 0 and < 1, got {threshold}"
            )
        super().__init__(loss or nn.BCEWithLogitsLoss(), metrics, f1=MicroF1(threshold))
        self.threshold = threshold

    def monitor(self) -> str:
        """Return the metric that the best checkpoint is chosen by."""
        return "f1"

    def interpret(self, output: Tensor) -> Tensor:
        """Return the probability of each label."""
        return output.float().sigmoid()

    def shape(self, target: Tensor) -> Shape:
        """Return [n, labels]."""
        return target.shape

    def scores(self, output: Tensor, target: Tensor) -> Scores:
        """Count the correct labels, and the samples with all labels correct."""
        predicted = output.detach().sigmoid() > self.threshold
        correct = predicted == (target > 0.5)
        return {
            "label_accuracy": (correct.sum(), correct.numel()),
            "exact_match": (correct.all(1).sum(), len(correct)),
        }
