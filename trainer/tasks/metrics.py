"""Metrics computed from sums, which stay on the device and are reduced over the processes."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regimen.data.batch import IGNORED
from regimen.trainer.device import accumulate_dtype
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.losses import flatten_positions

_LARGEST = 700.0  # the exponential of it is still finite


class Running:
    """Base class of metrics that keep sums over all samples of an evaluation.

    Only `compute` synchronizes with the device. A metric with several values lists their names in
    `keys` and returns a dict with these keys; they are logged as `<metric>_<key>`.
    """

    keys: Sequence[str] = ()

    def __init__(self, *shape: int) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        """Move the sums to where the batches are."""
        self.total = self.total.to(device, accumulate_dtype(device))

    def reset(self) -> None:
        """Reset the sums to zero."""
        self.total = torch.zeros_like(self.total)

    def merge(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by those over all processes."""
        self.total = reduce(self.total)


class R2(Running):
    """Coefficient of determination: 1 is a perfect prediction, 0 is as good as the mean."""

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add predictions and target values of the same shape."""
        y = target.to(self.total.dtype)
        prediction = output.detach().to(y.dtype)
        errors = (prediction - y.view_as(output)).square().sum()
        count = torch.full_like(errors, y.numel())
        self.total += torch.stack([count, y.sum(), y.square().sum(), errors])

    def compute(self) -> float:
        """Return 1 - squared errors / squared distances from the mean; NaN for constant targets."""
        # Waits for the device: an evaluation is over.
        count, total, squares, errors = self.total.tolist()
        if not count:
            return math.nan
        spread = squares - total * total / count
        return 1 - errors / spread if spread > 0 else math.nan


class Perplexity(Running):
    """The exponential of the mean negative log-likelihood of the labels that are not ignored.

    Ignored are those equal to `ignore_index` and those below 0.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2)
        self._ignore_index = ignore_index

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add logits (n, classes, ...) and labels (n, ...)."""
        logits = output.detach().float() if output.dtype.itemsize < 4 else output.detach()
        is_valid = (target >= 0) & (target != self._ignore_index)
        logits, labels = flatten_positions(logits, target.where(is_valid, IGNORED))
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        self.total += torch.stack([nll, is_valid.sum().to(nll.dtype)])

    def compute(self) -> float:
        """Return the perplexity."""
        # Waits for the device: an evaluation is over.
        nll, count = self.total.tolist()
        return math.exp(min(nll / count, _LARGEST)) if count else math.nan


class MicroF1(Running):
    """Micro-averaged F1 over all labels of all samples, for logits and targets of 0 and 1."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(3)
        self._threshold = threshold

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add logits and targets of the same shape."""
        predicted = output.detach().sigmoid() > self._threshold
        actual = target > 0.5
        true_positives = (predicted & actual).sum()
        false_positives = (predicted & ~actual).sum()
        false_negatives = (~predicted & actual).sum()
        self.total += torch.stack([true_positives, false_positives, false_negatives])

    def compute(self) -> float:
        """Return 2 TP / (2 TP + FP + FN); NaN where there is neither a label nor a prediction."""
        # Waits for the device: an evaluation is over.
        true_positives, false_positives, false_negatives = self.total.tolist()
        denominator = 2 * true_positives + false_positives + false_negatives
        return 2 * true_positives / denominator if denominator else math.nan


class ConfusionMatrix(Running):
    """Count samples (or pixels) by true and predicted class; labels of no class are excluded.

    `counts` (classes, classes) has a row for each true class. The value is the mean of the
    accuracies of the classes.
    """

    def __init__(self, num_classes: int) -> None:
        # The last entry, beyond those of the pairs, collects labels that are no class.
        super().__init__(num_classes * num_classes + 1)
        self.num_classes = num_classes

    @property
    def counts(self) -> Tensor:
        """Return the matrix."""
        return self.total[:-1].view(self.num_classes, self.num_classes)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add logits (n, classes, ...) and labels (n, ...) or probabilities (n, classes, ...)."""
        labels = target.argmax(1) if target.is_floating_point() else target
        predicted = output.detach().argmax(1)
        n = self.num_classes
        is_class = (labels >= 0) & (labels < n)
        pairs = torch.where(is_class, labels * n + predicted, n * n).flatten()
        # bincount would synchronize with the device to find the largest entry.
        self.total.index_add_(0, pairs, torch.ones_like(pairs, dtype=self.total.dtype))

    def values(self) -> Tensor:
        """Return the accuracy of each true class; NaN for a class that does not occur."""
        return self.counts.diagonal() / self.counts.sum(1)

    def compute(self) -> float | dict[str, float]:
        """Return the mean over the classes that have a value; waits for the device."""
        return float(self.values().nanmean())


class MeanIoU(ConfusionMatrix):
    """Intersection over union, averaged over the classes that occur or are predicted."""

    def values(self) -> Tensor:
        """Return the IoU of each class; NaN for a class that neither occurs nor is predicted."""
        hits = self.counts.diagonal()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - hits)


class MacroF1(ConfusionMatrix):
    """F1, averaged over the classes that occur or are predicted."""

    def values(self) -> Tensor:
        """Return the F1 of each class; NaN for a class that neither occurs nor is predicted."""
        return 2 * self.counts.diagonal() / (self.counts.sum(0) + self.counts.sum(1))


class PerClassAccuracy(ConfusionMatrix):
    """The accuracy of each class by name; the default for `classes` are those of the data set.

    `open_keys`: the keys are still 0, 1, ... and `name_classes` may replace them.
    """

    def __init__(self, num_classes: int, classes: Sequence[str] | None = None) -> None:
        super().__init__(num_classes)
        self.open_keys = classes is None
        self.keys = [str(name) for name in (range(num_classes) if classes is None else classes)]
        if len(self.keys) != num_classes:
            raise ModelError(f"classes has {len(self.keys)} names, but num_classes={num_classes}")

    def name_classes(self, classes: Sequence[str]) -> None:
        """Take the names of a data set's classes, unless `classes` were given.

        The numbers stay if the names are too few, too many, or not distinct.
        """
        # A slash would make another level of a logged name.
        names = [name.replace("/", "_") for name in classes]
        if self.open_keys and len(names) == self.num_classes == len(set(names)):
            self.keys = names
        self.open_keys = False

    def compute(self) -> dict[str, float]:
        """Return the accuracies by class; waits for the device."""
        return dict(zip(self.keys, self.values().tolist(), strict=True))
