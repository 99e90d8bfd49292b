"""The order that a configuration names, and users' samplers as functions of (seed, epoch)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from data.errors import DataError
from data.keys import ORDER, key, preserved_rng, random_state, seed_rng
from data.orders import LowMemory, Sequential, Shuffled, targets_of
from data.streams import Stream
from data.updates import Indices, Order, OrderedUpdates, Updates

# From this size on an order is computed by position: in memory it would take 0.8 GB.
HUGE = 100_000_000


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
