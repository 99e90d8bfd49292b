"""Confusion matrices, and precision and recall of each class."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regimen.callbacks.pictures.picture import ValidationPicture, class_names, labels_of, matrix
from regimen.callbacks.support import check_least
from regimen.trainer.media import Floats, PRCurve
from regimen.trainer.trainer import Trainer


class ConfusionMatrix(ValidationPicture):
    """Show how often each class is predicted for each, as `confusion/counts`, `confusion/shares`.

    Rows are labels, columns predictions; shares are those of a row. More than `max_classes` are not
    drawn.
    """

    kinds = ("classes",)
    on_main_only = False

    def __init__(self, max_classes: int = 100, every_n_validations: int | None = None) -> None:
        super().__init__(every_n_validations=every_n_validations)
        check_least(max_classes=max_classes)
        self._max_classes = max_classes

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts one of a number of classes that can be drawn."""
        count = getattr(trainer.task, "num_classes", None)
        if not count or count > self._max_classes:
            return False
        return super().fits(trainer)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the labels and the predictions of a batch."""
        self.kept.append((labels_of(trainer, batch[1]), output.argmax(1)))

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the counts over all processes."""
        labels, predicted = parts
        count = int(trainer.task.num_classes)  # type: ignore[attr-defined]
        # A number for each pair of label and prediction: its place in the flattened matrix.
        pairs = labels * count + predicted
        has_label = labels >= 0
        counts = (
            pairs[has_label].bincount(minlength=count * count).view(count, count).double().numpy()
        )
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        names = class_names(trainer, count)
        trainer.log_image("confusion/counts", matrix(counts, names))
        trainer.log_image("confusion/shares", matrix(shares, names, "{:.2f}"))


class PRCurves(ValidationPicture):
    """Log precision and recall of each class against the rest, as `pr_curve/<class>`.

    Of the first `max_classes` classes or labels, at `thresholds` values from 0 to 1.
    """

    kinds = ("classes", "labels")
    on_main_only = False

    def __init__(
        self, max_classes: int = 10, thresholds: int = 101, every_n_validations: int | None = None
    ) -> None:
        super().__init__(every_n_validations=every_n_validations)
        check_least(max_classes=max_classes)
        check_least(2, thresholds=thresholds)
        self._max_classes = max_classes
        self._thresholds = thresholds
        self._classes = 0

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the probabilities of a batch, and its labels."""
        self._classes = output.shape[1]
        probabilities = trainer.task.interpret(output)[:, : self._max_classes]
        if trainer.task.output_kind == "labels":
            labels = batch[1][:, : self._max_classes] > 0.5
        else:
            labels = labels_of(trainer, batch[1])
        self.kept.append((probabilities, labels))

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the curves over the samples of all processes."""
        probabilities, labels = parts
        if labels.ndim == 1:  # the class of each sample, below 0 where there is none
            has_class = labels >= 0
            probabilities = probabilities[has_class]
            labels = labels[has_class, None] == torch.arange(probabilities.shape[1])
        thresholds = torch.linspace(0, 1, self._thresholds, dtype=torch.float64)
        names = class_names(trainer, self._classes or probabilities.shape[1])
        classes = zip(names, probabilities.double().T, labels.T, strict=False)
        for name, scores, is_positive in classes:
            true = _count_above(scores[is_positive], thresholds)
            false = _count_above(scores[~is_positive], thresholds)
            curve = PRCurve(
                thresholds.numpy(),
                true_positives=true,
                false_positives=false,
                true_negatives=false[0] - false,
                false_negatives=true[0] - true,
            )
            trainer.log_pr_curve(f"pr_curve/{name}", curve)


def _count_above(scores: Tensor, thresholds: Tensor) -> Floats:
    """Return how many scores are at least as large as each threshold."""
    ascending = scores.sort().values
    counts: Floats = (len(scores) - torch.searchsorted(ascending, thresholds)).double().numpy()
    return counts
