"""Confusion matrices, and precision and recall of each class."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regimen.callbacks.pictures.picture import ValidationPicture, class_names, labels_of, matrix
from regimen.callbacks.support import check_least, require
from regimen.trainer.callback import PRCurve
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
        self._max_classes = max_classes

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts one of a number of classes that can be drawn."""
        count = getattr(trainer.task, "num_classes", None)
        return super().fits(trainer) and bool(count and count <= self._max_classes)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the labels and the predictions of a batch."""
        self.kept.append((labels_of(trainer, batch[1]), output.argmax(1)))

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the counts over all processes."""
        (labels, predicted), count = parts, int(trainer.task.num_classes)  # type: ignore[attr-defined]
        pairs = (labels * count + predicted)[labels >= 0]
        table = pairs.bincount(minlength=count * count).view(count, count).double().numpy()
        names, sums = class_names(trainer, count), table.sum(1, keepdims=True)
        trainer.log_image("confusion/counts", matrix(table, names))
        trainer.log_image("confusion/shares", matrix(table / np.maximum(sums, 1), names, "{:.2f}"))


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
        require(thresholds >= 2, f"thresholds={thresholds}: choose at least 2")
        self._max_classes = max_classes
        self._thresholds = thresholds
        self._classes = 0

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the probabilities of a batch, and what is right."""
        target, self._classes = batch[1], output.shape[1]
        of_labels = trainer.task.output_kind == "labels"
        right = target[:, : self._max_classes] > 0.5 if of_labels else labels_of(trainer, target)
        self.kept.append((trainer.task.interpret(output)[:, : self._max_classes], right))

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the curves over the samples of all processes."""
        scores, right = parts
        if right.ndim == 1:  # the class of each sample, or none
            known = right >= 0
            scores = scores[known]
            right = right[known][:, None] == torch.arange(scores.shape[1])
        thresholds = torch.linspace(0, 1, self._thresholds, dtype=torch.float64)
        names = class_names(trainer, self._classes or scores.shape[1])
        for name, given, positive in zip(names, scores.double().T, right.T, strict=False):
            counts = []
            for chosen in (positive, ~positive):
                ascending = given[chosen].sort().values
                counts.append(len(ascending) - torch.searchsorted(ascending, thresholds))
            true, false = (part.double().numpy() for part in counts)
            curve = PRCurve(thresholds.numpy(), true, false, false[0] - false, true[0] - true)
            trainer.log_pr_curve(f"pr_curve/{name}", curve)
