"""Orders of an epoch's samples: pure functions of (seed, epoch).

An order knows nothing of batches, workers, processes or devices. So the samples of an update are
the same however the work is divided, and a resume computes its position instead of replaying it.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from regimen.conf.errors import ConfigError
from regimen.data.errors import DataError
from regimen.data.keys import ORDER, Indices, Permutation, random_state
from regimen.data.splits import stratified_split


class Order(Protocol):
    """The order of an epoch's samples, as a pure function of its own seed and the epoch.

    An order that draws no sample twice in an epoch may declare `repeats = False`. The others are
    searched for repetitions once an epoch, which takes 8 bytes a sample.
    """

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    def __call__(self, epoch: int) -> Any:
        """Return the sample indices of an epoch: an int64 array, or an object that is sliced."""


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
    """All samples in a new random order each epoch, computed by position.

    It takes no memory, so the data set may have any size.
    """

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

    weights: one for each sample.
    num_samples: samples in an epoch; null = as many as the data set has.
    """

    def __init__(
        self,
        dataset: Sized,
        seed: int,
        weights: Sequence[float] | NDArray[Any],
        num_samples: int | None = None,
    ) -> None:
        self.seed = seed
        self.weights = np.asarray(weights, dtype=np.float64)
        self.num_samples = len(dataset) if num_samples is None else num_samples
        if self.weights.shape != (len(dataset),):
            raise DataError(
                f"loader.sampler.weights: {len(weights)} weights for {len(dataset)} samples"
            )
        if not 0 < self.weights.sum() < np.inf or self.weights.min() < 0:
            raise DataError("loader.sampler.weights: finite, none negative, not all 0")

    def __len__(self) -> int:
        return self.num_samples

    def __call__(self, epoch: int) -> Indices:
        """Draw the epoch's samples."""
        # Inverse transform sampling: sample i owns an interval as long as its weight.
        ends = np.cumsum(self.weights)
        points = random_state(self.seed, ORDER, epoch).random_sample(self.num_samples) * ends[-1]
        return np.asarray(np.searchsorted(ends, points, side="right"), np.int64)


class ClassBalanced(Weighted):
    """Classes drawn equally often: a sample's weight is (samples of its class) ** -power.

    power: 1 = equally often, 0 = as often as they occur, 0.5 = in between.
    """

    def __init__(
        self, dataset: Any, seed: int, power: float = 1.0, num_samples: int | None = None
    ) -> None:
        classes = classes_of(dataset)
        _, class_of, counts = np.unique(classes, return_inverse=True, return_counts=True)
        class_weights = counts.astype(np.float64) ** -power
        super().__init__(dataset, seed, class_weights[class_of], num_samples)


class Subset:
    """Some of the samples, in a new random order each epoch (or as they stand).

    size: how many (an int) or what fraction (a float); stratified if the data set has classes.
    subset_seed: chooses the samples; `seed` only shuffles them.
    """

    repeats: ClassVar[bool] = False

    def __init__(
        self, dataset: Any, seed: int, size: int | float, subset_seed: int = 0, shuffle: bool = True
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        samples = len(dataset)
        subset_size = size if isinstance(size, int) else round(size * samples)
        if not 0 < subset_size <= samples:
            raise DataError(f"loader.sampler.size={size} of {samples} samples is none or too many")

        labels = labels_of(dataset)
        if labels is None:
            labels = np.zeros(samples)
        self.indices, _ = stratified_split(labels, samples - subset_size, subset_seed)
        # The cut leaves at least one sample of each class, which may be more than the subset has.
        if len(self.indices) > subset_size:
            shuffled = random_state(subset_seed, ORDER).permutation(len(self.indices))
            self.indices = np.sort(self.indices[shuffled[:subset_size]])

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, epoch: int) -> Indices:
        """Return the subset's samples."""
        if not self.shuffle:
            return self.indices
        return self.indices[random_state(self.seed, ORDER, epoch).permutation(len(self))]


class Repeated:
    """Repeated augmentation: each sample that an epoch draws occurs `repeats` times.

    An epoch is as long as in DeiT (Touvron et al. 2021), the largest multiple of `round_to` that
    is at most the number of samples, so each epoch draws another one in `repeats` of them. Nothing
    is padded; the last sample may occur less often. The occurrence is part of the key of a
    sample's augmentation: no two are augmented alike.

    All occurrences of a sample lie within `spread` samples (at its ends, within two such parts),
    which should be an update. In it they are spread / repeats apart. So the micro-batches of
    `repeats` processes hold different samples, and MixUp, which pairs neighbours, mixes no sample
    with itself.
    """

    def __init__(
        self, dataset: Sized, seed: int, spread: int, repeats: int = 3, round_to: int = 256
    ) -> None:
        for name, value in {"spread": spread, "repeats": repeats, "round_to": round_to}.items():
            if value < 1:
                raise ConfigError(
                    f"loader.sampler.{name}", f"expected an integer >= 1, got {value!r}"
                )
        self.seed = seed
        self._spread = spread
        self._repeats = repeats
        self._samples = len(dataset)
        self._length = self._samples - self._samples % round_to
        if not self._length:
            raise DataError(
                f"loader.sampler.round_to={round_to}: an epoch has a multiple of so many samples, "
                f"and the training set has {self._samples}; set loader.sampler.round_to=1"
            )

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> Indices:
        """Return the epoch's samples, each of them `repeats` times."""
        shuffled = random_state(self.seed, ORDER, epoch).permutation(self._samples)
        places = np.arange(self._length)
        part = places // self._spread
        column = places % self._spread % self._repeats
        # A stable sort by part, then by column: it deals the places of a part out, in sequence.
        dealt = np.lexsort((column, part))
        return shuffled[dealt // self._repeats].astype(np.int64, copy=False)


def occurrences_in(order: Indices) -> Indices | None:
    """Return how often each sample of an order occurs before its place (n,).

    None if no sample is repeated.
    """
    by_sample = np.argsort(order, kind="stable")
    samples = order[by_sample]
    is_first = np.append(True, samples[1:] != samples[:-1])
    if is_first.all():
        return None

    # A stable sort puts equal samples side by side, in the order's sequence: the occurrence is the
    # distance from the first of them.
    places = np.arange(len(order), dtype=np.int64)
    first_places = np.maximum.accumulate(np.where(is_first, places, 0))
    occurrences = np.empty_like(places)
    occurrences[by_sample] = places - first_places
    return occurrences


def classes_of(dataset: Any) -> NDArray[Any]:
    """Return the class of every sample, from the data set's `targets`. Raises DataError."""
    classes = labels_of(dataset)
    if classes is None:
        raise DataError(
            f"loader.sampler: {type(dataset).__name__} has no `targets` to count classes by; "
            "regimen.data.orders.Weighted takes weights of your own"
        )
    return classes


def labels_of(dataset: Any) -> NDArray[Any] | None:
    """Return the class of every sample (n,); None if there are no targets, or they are no classes.

    Floats are measurements; lists and arrays are boxes and the like.
    """
    if not getattr(dataset, "has_labels", True):
        return None
    try:
        targets = np.asarray(getattr(dataset, "targets", None))
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths, such as boxes
        return None
    if targets.ndim != 1 or targets.dtype.kind == "f":
        return None
    if targets.dtype.hasobject and not all(isinstance(label, str) for label in targets):
        return None  # such as arrays of boxes
    return targets
