"""Orders of an epoch's samples, ours and those of users' samplers: functions of (seed, epoch)."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler

from data.errors import DataError
from data.keys import ORDER, Permutation, key, preserved_rng, random_state, seed_rng
from data.splits import cut
from data.streams import Stream
from data.updates import Indices, Order, OrderedUpdates, Updates

# From this size on an order is computed by position: in memory it would take 0.8 GB.
HUGE = 100_000_000


@dataclass(frozen=True, slots=True)
class Sequential:
    """All samples, first to last, in every epoch: the order of evaluation."""

    samples: int

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return 0, 1, 2, ..."""
        return np.arange(self.samples, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """All samples in a new random order each epoch."""

    samples: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return a permutation, which takes 8 bytes a sample."""
        shuffled = random_state(self.seed, ORDER, epoch).permutation(self.samples)
        return shuffled.astype(np.int64, copy=False)


class LowMemory:
    """All samples in a new random order each epoch, which takes no memory, for sets of any size."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.samples = len(dataset)
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Permutation:
        """Return the epoch's permutation, to be sliced."""
        return Permutation(self.samples, self.seed, ORDER, epoch)


class FirstOf:
    """The first `samples` of an order's epoch 0 in every epoch, for `trainer.overfit_batches`."""

    def __init__(self, order: Order, samples: int) -> None:
        self.indices = np.array(order(0)[: min(samples, len(order))])

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, epoch: int) -> Indices:
        """Return the same samples, whatever the epoch."""
        return self.indices


class Weighted:
    """Samples drawn with a probability proportional to their weights.

    weights: one for each sample. num_samples: of an epoch; null = as many as there are samples.
    replacement: whether a sample may come twice in an epoch.
    """

    def __init__(
        self,
        dataset: Sized,
        seed: int,
        weights: Sequence[float],
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        self.seed = seed
        self.weights = np.asarray(weights, dtype=np.float64)
        if self.weights.shape != (len(dataset),):
            raise DataError(
                f"loader.sampler.weights: {len(weights)} weights for {len(dataset)} samples"
            )
        allowed = np.isfinite(self.weights).all() and self.weights.min() >= 0
        if not allowed or self.weights.sum() <= 0:
            raise DataError("loader.sampler.weights: they must be finite, none negative, not all 0")
        self.num_samples = len(dataset) if num_samples is None else num_samples
        self.replacement = replacement
        if not replacement and self.num_samples > np.count_nonzero(self.weights):
            raise DataError(
                f"loader.sampler.num_samples={self.num_samples} without replacement: only "
                f"{np.count_nonzero(self.weights)} samples have a weight above 0"
            )

    def __len__(self) -> int:
        return self.num_samples

    def __call__(self, epoch: int) -> Indices:
        """Draw the epoch's samples."""
        state = random_state(self.seed, ORDER, epoch)
        if self.replacement:
            bounds = np.cumsum(self.weights)
            draws = state.random_sample(self.num_samples) * bounds[-1]
            return np.asarray(np.searchsorted(bounds, draws, side="right"), dtype=np.int64)
        # The smallest exponential variates are a weighted draw without replacement
        # (Efraimidis and Spirakis 2006); weight 0 gives infinity.
        with np.errstate(divide="ignore", invalid="ignore"):
            clocks = -np.log1p(-state.random_sample(len(self.weights))) / self.weights
        return np.asarray(np.argsort(clocks, kind="stable")[: self.num_samples], dtype=np.int64)


class ClassBalanced(Weighted):
    """Classes drawn equally often, by weights from the data set's own counts.

    power: 1 = equally often, 0 = as often as they occur, 0.5 = in between.
    """

    def __init__(
        self, dataset: Any, seed: int, power: float = 1.0, num_samples: int | None = None
    ) -> None:
        targets = targets_of(dataset)
        _, class_of, counts = np.unique(targets, return_inverse=True, return_counts=True)
        weights = (counts.astype(np.float64) ** -power)[class_of]
        super().__init__(dataset, seed, weights.tolist(), num_samples)


class Subset:
    """Some of the samples, in a new random order each epoch (or as listed).

    indices: which; or size: how many (an int) or what share (a float), stratified where the data
    set has targets, the same for every `seed` and chosen by `subset_seed`.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        indices: Sequence[int] | None = None,
        size: int | float | None = None,
        subset_seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if (indices is None) == (size is None):
            raise DataError("loader.sampler: a subset takes either indices or size")
        if size is not None:
            self.indices = _part(dataset, size, subset_seed)
        else:
            self.indices = np.asarray(indices, dtype=np.int64)
            low, high = (min(self.indices, default=0), max(self.indices, default=0))
            if low < 0 or high >= len(dataset):
                raise DataError(
                    f"loader.sampler.indices go from {low} to {high}, "
                    f"but the {len(dataset)} samples count from 0"
                )
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, epoch: int) -> Indices:
        """Return the subset's samples."""
        if not self.shuffle:
            return self.indices
        return self.indices[random_state(self.seed, ORDER, epoch).permutation(len(self.indices))]


class PerClass:
    """Updates of `classes` classes with `samples` samples each, for metric learning.

    An epoch has about as many samples as the data set.
    """

    def __init__(self, dataset: Any, seed: int, classes: int, samples_per_class: int) -> None:
        targets = targets_of(dataset)
        self.members = [np.flatnonzero(targets == label) for label in np.unique(targets)]
        if classes > len(self.members):
            raise DataError(
                f"loader.batch_sampler.classes={classes}: there are only {len(self.members)}"
            )
        self.seed = seed
        self.classes = classes
        self.samples_per_class = samples_per_class
        self._updates = max(1, len(targets) // (classes * samples_per_class))

    def __len__(self) -> int:
        return self._updates

    def samples(self, epoch: int, update: int) -> Indices:
        """Draw classes without replacement, and samples of each; again if it has too few."""
        state = random_state(self.seed, ORDER, epoch, update)
        chosen = state.permutation(len(self.members))[: self.classes]
        drawn = []
        for label in chosen:
            members = self.members[label]
            few = len(members) < self.samples_per_class
            drawn.append(state.choice(members, self.samples_per_class, replace=few))
        return np.concatenate(drawn).astype(np.int64)


def targets_of(dataset: Any) -> npt.NDArray[Any]:
    """Return the class of every sample, from the data set's `targets`."""
    targets = getattr(dataset, "targets", None)
    if targets is None:
        raise DataError(
            f"loader.sampler: {type(dataset).__name__} has no `targets` to count classes by; "
            "give it that attribute, or use data.orders.Weighted with weights of your own"
        )
    return np.asarray(targets)


def _part(dataset: Any, size: int | float, seed: int) -> Indices:
    samples = len(dataset)
    wanted = size if isinstance(size, int) else round(size * samples)
    if not 0 < wanted <= samples:
        raise DataError(f"loader.sampler.size={size} of {samples} samples is none or too many")
    # `cut` leaves at least one sample of each class: for most of the samples, cut the others off.
    targets = getattr(dataset, "targets", None)
    if targets is None or np.ndim(targets) != 1:
        targets = np.zeros(samples, dtype=np.int64)
    chosen = cut(targets, samples - wanted, seed)[0]
    if len(chosen) == wanted:
        return chosen
    return np.sort(chosen[random_state(seed, ORDER).permutation(len(chosen))[:wanted]])


def default_order(dataset: Any, seed: int, shuffle: bool = True) -> Order:
    """Return the order of a data set without a sampler; a stream has its own order."""
    if not shuffle or isinstance(dataset, Stream):
        return Sequential(len(dataset))
    return LowMemory(dataset, seed) if len(dataset) >= HUGE else Shuffled(len(dataset), seed)


def as_order(sampler: Any, seed: int) -> Order:
    """Return an order: `sampler` itself if it is one, else the indices it yields.

    Each epoch, `set_epoch` is called, the sampler's `generator` and the global generators are
    seeded by (seed, epoch), and it is read once. A sampler with random state elsewhere cannot be
    repeated and is refused.
    """
    if callable(sampler) and hasattr(sampler, "__len__"):
        order: Order = sampler
        return order
    return SamplerOrder(sampler, seed)


def as_updates(batch_sampler: Any, seed: int) -> Updates:
    """Return updates: `batch_sampler` itself if it makes them, else the batches it yields."""
    if hasattr(batch_sampler, "samples"):
        updates: Updates = batch_sampler
        return updates
    return GivenBatches(batch_sampler, seed)


def own_samples(updates: Updates) -> Indices | None:
    """Return the samples that may replace a broken one: those of epoch 0; None: all there are."""
    everything = (Sequential, Shuffled, LowMemory)
    if isinstance(updates, OrderedUpdates) and isinstance(updates.order, everything):
        return None
    drawn = [np.asarray(updates.samples(0, update)) for update in range(len(updates))]
    return np.unique(np.concatenate(drawn))


class _Sampler:
    """What a user's sampler yields in an epoch, read once: numbers, or lists of them."""

    key = "loader.sampler"

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        if any(isinstance(p, DistributedSampler) and p.num_replicas > 1 for p in _nested(sampler)):
            raise DataError(
                "loader.sampler: DistributedSampler is not needed, an update's samples are shared "
                "out over the devices anyway; use a sampler of all samples"
            )
        self._epoch, self._items = 0, self._read(0)
        self._read(1)
        if self._read(0) != self._items:
            raise DataError(
                f"loader.sampler: {type(sampler).__name__} gives another order when the same epoch "
                "is read again, so a resume could not be exact: draw from torch's, random's or "
                "numpy's global functions, from an attribute `generator`, or by `set_epoch`"
            )

    def __len__(self) -> int:
        return len(self._items)

    def _of(self, epoch: int) -> list[Any]:
        if epoch != self._epoch:
            items = self._read(epoch)
            if len(items) != len(self):
                raise DataError(
                    f"{self.key} gives {len(items)} in epoch {epoch}, but {len(self)} in epoch "
                    f"{self._epoch}: the number must not change, for the schedule and a resume "
                    "count on it"
                )
            self._epoch, self._items = epoch, items
        return self._items

    def _read(self, epoch: int) -> list[Any]:
        with _keyed(self.sampler, self.seed, epoch):
            return [
                item if isinstance(item, int) else np.asarray(item).astype(np.int64).tolist()
                for item in self.sampler
            ]


class SamplerOrder(_Sampler):
    """The order in which a torch sampler, or any iterable of indices, yields samples."""

    def __call__(self, epoch: int) -> Indices:
        """Return the epoch's samples; their number must not change."""
        return np.array(self._of(epoch), np.int64)


class GivenBatches(_Sampler):
    """The updates that a batch sampler yields: each list of indices is one, over all devices."""

    key = "loader.batch_sampler"

    def __init__(self, sampler: Iterable[Iterable[int]], seed: int) -> None:
        super().__init__(sampler, seed)
        if not self._items or not all(self._items):
            raise DataError("loader.batch_sampler gives no batches, or empty ones")

    def samples(self, epoch: int, update: int) -> Indices:
        """Return one update's samples."""
        return np.array(self._of(epoch)[update], np.int64)


@contextmanager
def _keyed(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """Seed a sampler, and those within it, for an epoch; restore the global generators after."""
    epoch_key = key(seed, ORDER, epoch)
    with preserved_rng():
        seed_rng(epoch_key)
        for part in _nested(sampler):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(epoch_key)
        yield


def _nested(sampler: Any) -> Iterator[Any]:
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
