"""The confusion matrix, counted on the device, and what is told of a classifier by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.running import Running


class ConfusionMatrix(Running):
    """Count samples (or pixels) by true class and answer; labels of no class are left out.

    `counts` (classes, classes) has a row for each true class. The value is the mean over the
    classes of each one's accuracy.
    """

    def __init__(self, num_classes: int) -> None:
        # One more entry than pairs: the labels of no class are counted there.
        super().__init__(num_classes * num_classes + 1)
        self.num_classes = num_classes

    @property
    def counts(self) -> Tensor:
        """Return the matrix."""
        return self.total[:-1].view(self.num_classes, self.num_classes)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in logits (n, classes, ...) and labels (n, ...) or shares (n, classes, ...)."""
        labels = target.argmax(1) if target.is_floating_point() else target
        answers, n = output.detach().argmax(1), self.num_classes
        valid = (labels >= 0) & (labels < n)
        pairs = torch.where(valid, labels * n + answers, n * n).flatten()
        # bincount would wait for the device to learn the largest entry.
        self.total.index_add_(0, pairs, torch.ones_like(pairs, dtype=self.total.dtype))

    def compute(self) -> float | dict[str, float]:
        """Return the mean of the accuracies of the classes that occur."""
        return _mean(self.accuracies())

    def accuracies(self) -> Tensor:
        """Return the share of each true class that is answered rightly; NaN where it is absent."""
        return self.counts.diagonal() / self.counts.sum(1)

    def ious(self) -> Tensor:
        """Return intersection over union of each class; NaN where it is neither there nor said."""
        hits = self.counts.diagonal()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - hits)

    def f1s(self) -> Tensor:
        """Return each class's F1; NaN where it is neither there nor said."""
        return 2 * self.counts.diagonal() / (self.counts.sum(0) + self.counts.sum(1))


class MeanIoU(ConfusionMatrix):
    """Intersection over union, the mean over the classes that occur."""

    def compute(self) -> float:
        """Return the mean."""
        return _mean(self.ious())


class MacroF1(ConfusionMatrix):
    """F1, the mean over the classes that occur."""

    def compute(self) -> float:
        """Return the mean."""
        return _mean(self.f1s())


class PerClassAccuracy(ConfusionMatrix):
    """The accuracy of each class by its name; `classes` are 0, 1, ... if not given."""

    def __init__(self, num_classes: int, classes: Sequence[str] | None = None) -> None:
        super().__init__(num_classes)
        self.keys = [str(c) for c in (range(num_classes) if classes is None else classes)]
        if len(self.keys) != num_classes:
            raise ModelError(f"classes names {len(self.keys)}, but num_classes={num_classes}")

    def compute(self) -> dict[str, float]:
        """Return the accuracies."""
        return dict(zip(self.keys, self.accuracies().tolist(), strict=True))


def _mean(values: Tensor) -> float:
    return float(values.nanmean())
