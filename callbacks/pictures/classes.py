"""Confusion matrices, and precision and recall of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from callbacks.support.drawing import matrix
from callbacks.support.errors import CallbackError
from callbacks.support.watching import ValidationPicture, class_names, labels_of
from trainer.media import PRCurve

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class ConfusionMatrix(ValidationPicture):
    """Show how often each class is predicted for each, as `confusion/counts`, `confusion/shares`.

    Rows are labels, columns predictions; shares are those of a row. More than `max_classes` are not
    drawn.
    """

    def __init__(self, max_classes: int = 100, every_n_validations: int | None = None) -> None:
        super().__init__(every_n_validations)
        self._max_classes = max_classes
        self._counts: Tensor | None = None

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts one of a number of classes that can be drawn."""
        count = getattr(trainer.task, "num_classes", None)
        return trainer.task.output_kind == "classes" and bool(count and count <= self._max_classes)

    def start(self, trainer: Trainer) -> None:
        """Start with zero counts."""
        count = trainer.task.num_classes  # type: ignore[attr-defined]
        self._counts = torch.zeros(count * count, device=trainer.strategy.device)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Count the pairs of label and prediction of a batch."""
        assert self._counts is not None
        labels = labels_of(batch[1])
        known = labels >= 0
        pairs = labels.clamp(min=0) * output.shape[1] + output.argmax(1)
        self._counts.index_add_(0, pairs, known.to(self._counts.dtype))

    def show(self, trainer: Trainer) -> None:
        """Log the counts over all processes."""
        assert self._counts is not None
        counts = trainer.group.reduce(self._counts)
        if not trainer.is_main:
            return
        count = int(len(counts) ** 0.5)
        table = counts.double().cpu().numpy().reshape(count, count)
        names = class_names(trainer, count)
        trainer.log_image("confusion/counts", matrix(table, names))
        shares = table / np.maximum(table.sum(1, keepdims=True), 1)
        trainer.log_image("confusion/shares", matrix(shares, names, "{:.2f}"))


class PRCurves(ValidationPicture):
    """Log precision and recall of each class against the rest, as `pr_curve/<class>`.

    Of the first `max_classes` classes or labels, at `thresholds` values from 0 to 1.
    """

    def __init__(
        self, max_classes: int = 10, thresholds: int = 101, every_n_validations: int | None = None
    ) -> None:
        super().__init__(every_n_validations)
        if thresholds < 2 or max_classes < 1:
            raise CallbackError(
                f"thresholds={thresholds}, max_classes={max_classes}: at least 2 and 1"
            )
        self._max_classes = max_classes
        self._thresholds = thresholds
        self._found: Tensor | None = None  # [negative or positive, class, threshold]
        self._classes = 0

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task predicts probabilities of classes or labels."""
        return trainer.task.output_kind in ("classes", "labels")

    def start(self, trainer: Trainer) -> None:
        """Start with zero counts."""
        self._found, self._classes = None, 0

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Sort the probabilities of a batch into the intervals between the thresholds."""
        scores = trainer.task.interpret(output)[:, : self._max_classes]
        self._classes, count = output.shape[1], scores.shape[1]
        if self._found is None:
            self._found = torch.zeros(2 * count * self._thresholds, device=scores.device)
        numbers = torch.arange(count, device=scores.device)
        target = batch[1]
        if trainer.task.output_kind == "labels":
            positive, known = target[:, :count] > 0.5, torch.ones_like(scores)
        else:
            labels = labels_of(target)
            positive = labels[:, None] == numbers
            known = (labels >= 0)[:, None].expand_as(scores).to(scores.dtype)
        place = (scores.clamp(0, 1) * (self._thresholds - 1)).long()
        index = (positive.long() * count + numbers) * self._thresholds + place
        self._found.index_add_(0, index.flatten(), known.flatten().to(self._found.dtype))

    def show(self, trainer: Trainer) -> None:
        """Log the curves over the samples of all processes."""
        count = max(trainer.group.gather(self._classes))  # a process may have no sample
        if not count:
            return
        if self._found is None:
            size = 2 * min(count, self._max_classes) * self._thresholds
            self._found = torch.zeros(size, device=trainer.strategy.device)
        total = trainer.group.reduce(self._found)
        if not trainer.is_main:
            return
        found = total.double().cpu().numpy().reshape(2, -1, self._thresholds)
        for index, name in zip(range(found.shape[1]), class_names(trainer, count), strict=False):
            trainer.log_pr_curve(f"pr_curve/{name}", _curve(found[0, index], found[1, index]))


def _curve(negatives: Any, positives: Any) -> PRCurve:
    """Return the curve from the numbers of samples in each interval of scores."""
    false, true = (np.cumsum(part[::-1])[::-1] for part in (negatives, positives))
    return PRCurve(
        thresholds=np.linspace(0, 1, len(true)),
        true_positives=true,
        false_positives=false,
        true_negatives=negatives.sum() - false,
        false_negatives=positives.sum() - true,
    )
