"""Orders of an epoch's samples: functions of (seed, epoch)."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from regimen.data.errors import DataError
from regimen.data.keys import ORDER, Indices, Permutation, random_state
from regimen.data.splits import cut


class Order(Protocol):
    """The order of an epoch's samples, as a pure function of its own seed and the epoch.

    One that draws no sample twice in an epoch may say so by `repeats = False`: the others are
    searched for repetitions once an epoch, which takes 8 bytes a sample.
    """

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    def __call__(self, epoch: int) -> Any:
        """Return the sample indices of an epoch: an int64 array, or what computes its slices."""


@dataclass(frozen=True, slots=True)
class Sequential:
    """All samples, first to last, in every epoch: the order of evaluation."""

    repeats: ClassVar[bool] = False
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return 0, 1, 2, ..."""
        return np.arange(self.samples, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """All samples in a new random order each epoch."""

    repeats: ClassVar[bool] = False
    samples: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return a permutation, which takes 8 bytes a sample."""
        shuffled = random_state(self.seed, ORDER, epoch).permutation(self.samples)
        return shuffled.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class LowMemory:
    """All samples in a new random order each epoch, which takes no memory, for sets of any size."""

    repeats: ClassVar[bool] = False
    dataset: Sized
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)

    def __call__(self, epoch: int) -> Permutation:
        """Return the epoch's permutation, to be sliced."""
        return Permutation(len(self), self.seed, ORDER, epoch)


class Weighted:
    """Samples drawn, with replacement, with a probability proportional to their weights.

    weights: one for each sample. num_samples: of an epoch; null = as many as there are samples.
    """

    def __init__(
        self, dataset: Sized, seed: int, weights: Sequence[float], num_samples: int | None = None
    ) -> None:
        self.seed = seed
        self.weights = np.asarray(weights, dtype=np.float64)
        self.num_samples = len(dataset) if num_samples is None else num_samples
        if self.weights.shape != (len(dataset),):
            wrong = f"{len(weights)} weights for {len(dataset)} samples"
            raise DataError(f"loader.sampler.weights: {wrong}")
        if not 0 < self.weights.sum() < np.inf or self.weights.min() < 0:
            raise DataError("loader.sampler.weights: finite, none negative, not all 0")

    def __len__(self) -> int:
        return self.num_samples

    def __call__(self, epoch: int) -> Indices:
        """Draw the epoch's samples."""
        bounds = np.cumsum(self.weights)
        drawn = random_state(self.seed, ORDER, epoch).random_sample(self.num_samples)
        return np.asarray(np.searchsorted(bounds, drawn * bounds[-1], side="right"), np.int64)


class ClassBalanced(Weighted):
    """Classes drawn equally often, by weights from the data set's own counts.

    power: 1 = equally often, 0 = as often as they occur, 0.5 = in between.
    """

    def __init__(
        self, dataset: Any, seed: int, power: float = 1.0, num_samples: int | None = None
    ) -> None:
        _, class_of, counts = np.unique(
            classes_of(dataset), return_inverse=True, return_counts=True
        )
        weights = (counts.astype(np.float64) ** -power)[class_of]
        super().__init__(dataset, seed, weights.tolist(), num_samples)


class Subset:
    """Some of the samples, in a new random order each epoch (or as they stand).

    size: how many (an int) or what share (a float), stratified where the data set has classes, the
    same for every `seed` and chosen by `subset_seed`.
    """

    repeats: ClassVar[bool] = False

    def __init__(
        self, dataset: Any, seed: int, size: int | float, subset_seed: int = 0, shuffle: bool = True
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        samples = len(dataset)
        wanted = size if isinstance(size, int) else round(size * samples)
        if not 0 < wanted <= samples:
            raise DataError(f"loader.sampler.size={size} of {samples} samples is none or too many")
        # `cut` leaves at least one sample of each class: for most samples, cut the others off.
        labels = np.zeros(samples) if (found := labels_of(dataset)) is None else found
        self.indices = cut(labels, samples - wanted, subset_seed)[0]
        if len(self.indices) > wanted:
            shuffled = random_state(subset_seed, ORDER).permutation(len(self.indices))
            self.indices = np.sort(self.indices[shuffled[:wanted]])

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, epoch: int) -> Indices:
        """Return the subset's samples."""
        if not self.shuffle:
            return self.indices
        return self.indices[random_state(self.seed, ORDER, epoch).permutation(len(self))]


def occurrences_in(order: Indices) -> Indices | None:
    """Return how often each sample of an order stands before it (n,); None if none is repeated."""
    by_sample = np.argsort(order, kind="stable")
    samples = order[by_sample]
    is_first = np.append(True, samples[1:] != samples[:-1])
    if is_first.all():
        return None
    # Equal samples stand side by side now, in the order's sequence: each is counted from the first.
    places = np.arange(len(order), dtype=np.int64)
    first = np.maximum.accumulate(np.where(is_first, places, 0))
    found = np.empty_like(places)
    found[by_sample] = places - first
    return found


def classes_of(dataset: Any) -> NDArray[Any]:
    """Return the class of every sample, from the data set's `targets`. Raises DataError."""
    if (classes := labels_of(dataset)) is None:
        what = f"{type(dataset).__name__} has no `targets` to count classes by"
        raise DataError(
            f"loader.sampler: {what}; regimen.data.orders.Weighted takes weights of your own"
        )
    return classes


def labels_of(dataset: Any) -> NDArray[Any] | None:
    """Return the class of every sample; None of those that have none, or measurements."""
    try:
        found = np.asarray(getattr(dataset, "targets", None))
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths, such as boxes
        return None
    if found.ndim != 1 or found.dtype.kind == "f":
        return None
    if found.dtype.hasobject and not all(isinstance(label, str) for label in found):
        return None  # as arrays of boxes
    return found
