"""Metrics that are functions of sums: the sums stay on the device, and processes add them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ModelError
from trainer.tasks.losses import by_place

_LARGEST = 700.0  # whose exponential is still a number


class Running:
    """Keep sums over all samples of an evaluation; `compute` turns them into a value.

    Nothing waits for the device before `compute`. A metric of several values names them in `keys`
    and returns them by these names: they are logged as `<metric>_<key>`.
    """

    keys: Sequence[str] = ()

    def __init__(self, *shape: int) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        """Move the sums to where the batches are."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.total = self.total.to(device, dtype)

    def reset(self) -> None:
        """Forget all batches."""
        self.total = torch.zeros_like(self.total)

    def merge(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of all processes."""
        self.total = reduce(self.total)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""
        raise NotImplementedError

    def compute(self) -> float | dict[str, float]:
        """Return the value over all batches since `reset`."""
        raise NotImplementedError


class R2(Running):
    """Share of the target's variance that is explained; 1 is perfect, 0 as good as the mean."""

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in answers and values of the same shape."""
        y = target.to(self.total.dtype)
        errors = (output.detach().to(y.dtype) - y.view_as(output)).square().sum()
        count = torch.full_like(errors, y.numel())
        self.total += torch.stack([count, y.sum(), y.square().sum(), errors])

    def compute(self) -> float:
        """Return 1 - squared errors / squared distances from the mean; NaN for equal targets."""
        count, total, squares, errors = self.total.tolist()
        spread = squares - total * total / count if count else 0.0
        return 1 - errors / spread if spread > 0 else math.nan


class Perplexity(Running):
    """The exponential of the mean negative log-likelihood of the labels that count."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2)
        self._ignore_index = ignore_index

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in logits (n, classes, ...) and labels (n, ...)."""
        logits = output.detach().float() if output.dtype.itemsize < 4 else output.detach()
        places = by_place(logits, target)
        nll = F.cross_entropy(*places, ignore_index=self._ignore_index, reduction="sum")
        self.total += torch.stack([nll, (target != self._ignore_index).sum().to(nll.dtype)])

    def compute(self) -> float:
        """Return the perplexity."""
        nll, count = self.total.tolist()
        return math.exp(min(nll / count, _LARGEST)) if count else math.nan


class MicroF1(Running):
    """F1 over all labels of all samples together, for logits and targets of 0 and 1."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(3)
        self._threshold = threshold

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in logits and targets of the same shape."""
        said, true = output.detach().sigmoid() > self._threshold, target > 0.5
        self.total += torch.stack([(said & true).sum(), (said & ~true).sum(), (~said & true).sum()])

    def compute(self) -> float:
        """Return 2 TP / (2 TP + FP + FN); NaN where there is no label at all."""
        hits, false, missed = self.total.tolist()
        whole = 2 * hits + false + missed
        return 2 * hits / whole if whole else math.nan


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
