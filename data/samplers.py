"""The samples of each update: chosen by an order or a sampler, split into micro-batches of ranks.

An update's samples are a pure function of (seed, epoch, update, batch_size), and each micro-batch
is a slice of them. So any number of processes or workers trains the same updates, and a resume
starts at any update without reading those before it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from regimen.data.batch import BatchSlice
from regimen.data.errors import DataError
from regimen.data.keys import ORDER, Indices, key, preserved_rng, random_state, seed_rng
from regimen.data.orders import LowMemory, Order, Sequential, Shuffled, classes_of, occurrences_in
from regimen.data.streams import Stream

# From this size on an order is computed by position: in memory it would take at least 0.8 GB.
HUGE = 100_000_000


class Updates(Protocol):
    """The samples of each update: of `loader.batch_sampler`, or an order split by size.

    As an order, it may declare `repeats = False`.
    """

    def __len__(self) -> int:
        """Return the number of updates in an epoch."""

    def samples(self, epoch: int, update: int) -> Indices:
        """Return the sample indices of one update over all ranks and micro-batches."""


class OrderedUpdates:
    """Cut an order into updates of `batch_size` samples; the last may be short."""

    def __init__(self, order: Order, batch_size: int, drop_last: bool = False) -> None:
        if len(order) == 0:
            raise DataError("the data set has no samples: see data.root and the split's settings")
        if drop_last and len(order) < batch_size:
            raise DataError(
                f"loader.drop_last leaves no update: {len(order)} samples are fewer than "
                f"loader.batch_size={batch_size}; lower it or drop none"
            )
        self.order = order
        self.batch_size = batch_size
        self._drop_last = drop_last
        self._length = len(order)  # samples that are used
        if drop_last:
            self._length -= self._length % batch_size
        # The order of the epoch that was asked for last: computed once, sliced for each update.
        self._epoch: int | None = None
        self._epoch_order: Any = None
        # An epoch that a resume continues: its number, the next update, the samples before it.
        self._resumed_epoch = -1
        self._resumed_update = 0
        self._resumed_samples = 0

    @property
    def repeats(self) -> bool:
        """Whether the order may draw a sample twice in an epoch."""
        return bool(getattr(self.order, "repeats", True))

    def __len__(self) -> int:
        return -(-self._length // self.batch_size)

    def resume(self, epoch: int, seen: int, length: int) -> int:
        """Continue an epoch of `length` updates behind its first `seen` samples.

        Those samples may have been seen in updates of another size. The updates that are left get
        the last numbers of the epoch. Returns the number of the next one; `length` if none is left.
        """
        samples_left = max(0, min(self._length, length * self.batch_size) - seen)
        updates_left = samples_left // self.batch_size
        if not self._drop_last and samples_left % self.batch_size:
            updates_left += 1
        self._resumed_epoch = epoch
        self._resumed_update = length - updates_left
        self._resumed_samples = seen
        return self._resumed_update

    def samples(self, epoch: int, update: int) -> Indices:
        """Return the sample indices of one update; the epoch's order is computed once."""
        if self._epoch != epoch:
            self._epoch_order = self.order(epoch)
            self._epoch = epoch
        first = update * self.batch_size
        if epoch == self._resumed_epoch and update >= self._resumed_update:
            updates_before = update - self._resumed_update
            first = self._resumed_samples + updates_before * self.batch_size
        stop = min(first + self.batch_size, self._length)
        indices: Indices = self._epoch_order[first:stop]
        return indices


@dataclass(eq=False)
class UpdateSampler:
    """Yield each rank's micro-batches of any updates, without replaying earlier ones.

    The n samples of an update are split, as by `numpy.array_split`, into
    `gradient_accumulation_steps * world_size` slices; slice (m, r) is number m * world_size + r.
    Micro-batches whose rank-0 slice is empty are left out, so all ranks have the same number.

    updates: an `Updates`, or an `Order` that is cut into updates of `batch_size` samples.
    """

    updates: Any
    _: KW_ONLY
    batch_size: int
    drop_last: bool = False
    gradient_accumulation_steps: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if callable(self.updates):
            self.updates = OrderedUpdates(self.updates, self.batch_size, self.drop_last)
        self._may_repeat = bool(getattr(self.updates, "repeats", True))
        # The epoch whose repetitions were counted last: an occurrence for each of its samples (None
        # if no sample is repeated), and where each update begins among them.
        self._counted_epoch: int | None = None
        self._occurrences: Indices | None = None
        self._starts = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self.updates)

    @property
    def samples(self) -> int | None:
        """The number of samples in an epoch; None if a batch sampler gives whole updates."""
        return len(self.updates.order) if isinstance(self.updates, OrderedUpdates) else None

    def resume(self, epoch: int, seen: int, length: int) -> int | None:
        """Continue behind `seen` samples, as `OrderedUpdates.resume`; None for a batch sampler."""
        if isinstance(self.updates, OrderedUpdates):
            return self.updates.resume(epoch, seen, length)
        return None

    def batch_slices(self, epoch: int, update: int) -> list[BatchSlice]:
        """Return this rank's micro-batches of an update, in execution order.

        The indices are arrays of the host: nothing here waits for a device.
        """
        indices = self.updates.samples(epoch, update).tolist()
        occurrences = self._occurrences_of(epoch, update)
        total = len(indices)
        slices = self.gradient_accumulation_steps * self.world_size
        size, longer_slices = divmod(total, slices)  # the first ones have a sample more
        micro_batches = -(-min(total, slices) // self.world_size)

        batch_slices = []
        for micro_batch in range(micro_batches):
            number = micro_batch * self.world_size + self.rank
            start = number * size + min(number, longer_slices)
            count = size + 1 if number < longer_slices else size
            stop = start + count
            if count == 0:
                # This rank has no sample left, but takes part in the collectives: it borrows the
                # update's first one, with count 0.
                start = 0
                stop = 1
            repeated = tuple(occurrences[start:stop])
            if not any(repeated):
                repeated = ()  # as in most orders: nothing to send to the workers
            batch_slice = BatchSlice(
                tuple(indices[start:stop]),
                count,
                start,
                total,
                micro_batch,
                micro_batches,
                epoch,
                update,
                repeated,
            )
            batch_slices.append(batch_slice)
        return batch_slices

    def _occurrences_of(self, epoch: int, update: int) -> list[int]:
        """Return how often the epoch drew each sample of an update before it; empty if never.

        The occurrence is part of the key of a sample's augmentation. It is a function of the
        epoch's whole order, not of what was trained on, so that a resume in the middle of an epoch
        and every process find the same. Arrays of the host: nothing here waits for a device.
        """
        if not self._may_repeat:
            return []
        if self._counted_epoch != epoch:
            every = [self.updates.samples(epoch, number) for number in range(len(self.updates))]
            self._starts = np.cumsum([0, *map(len, every)])
            self._occurrences = occurrences_in(np.concatenate(every))
            self._counted_epoch = epoch
        if self._occurrences is None:
            return []
        start, stop = self._starts[update : update + 2]
        occurrences: list[int] = self._occurrences[start:stop].tolist()
        return occurrences

    def walk(self, epoch: int, start: int, stop: int) -> Iterator[BatchSlice]:
        """Yield this rank's slices of updates `start` to `stop` of an epoch."""
        for update in range(start, stop):
            yield from self.batch_slices(epoch, update)


def default_order(dataset: Any, seed: int, shuffle: bool = True) -> Order:
    """Return the order of a data set without a sampler; a stream or a mixture has its own."""
    make_order = getattr(dataset, "order", None)
    if callable(make_order):
        order: Order = make_order(seed, shuffle)
        return order
    if not shuffle or isinstance(dataset, Stream):
        return Sequential(len(dataset))
    if len(dataset) >= HUGE:
        return LowMemory(dataset, seed)
    return Shuffled(len(dataset), seed)


def as_order(sampler: Any, seed: int) -> Order:
    """Return an order: `sampler` itself if it is one, else the indices it yields.

    Each epoch, `set_epoch` is called, the sampler's `generator` and the global generators are
    seeded by (seed, epoch), and it is read once. A sampler with random state elsewhere cannot be
    repeated and is refused.
    """
    is_order = callable(sampler) and hasattr(sampler, "__len__")
    return sampler if is_order else SamplerOrder(sampler, seed)


def as_updates(batch_sampler: Any, seed: int) -> Updates:
    """Return `batch_sampler` itself if it is an `Updates`, else the batches it yields."""
    return batch_sampler if hasattr(batch_sampler, "samples") else GivenBatches(batch_sampler, seed)


def replacement_samples(updates: Updates) -> Sequence[int] | Indices:
    """Return the samples that may replace a broken one: those of epoch 0."""
    orders_of_all = (Sequential, Shuffled, LowMemory)
    if isinstance(updates, OrderedUpdates) and isinstance(updates.order, orders_of_all):
        return range(len(updates.order))
    return np.unique(np.concatenate([updates.samples(0, u) for u in range(len(updates))]))


class _Sampler:
    """Read a user's sampler once an epoch: it yields indices, or lists of indices."""

    key = "loader.sampler"

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._nested: list[Any] = []  # the sampler, the one within it, and so on
        inner: Any = sampler
        while inner is not None:
            self._nested.append(inner)
            inner = getattr(inner, "sampler", None)
        if any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in self._nested):
            raise DataError(
                f"{self.key}: DistributedSampler is not needed, an update's samples are shared "
                "out over the devices anyway; use a sampler of all samples"
            )

        # A resume is exact only if an epoch can be read again: read another one in between.
        self._epoch = 0
        self._items = self._read(0)
        self._read(1)
        if self._read(0) != self._items:
            raise DataError(
                f"{self.key}: {type(sampler).__name__} gives another order when the same epoch is "
                "read again, so a resume could not be exact: draw from torch's, random's or "
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
            self._epoch = epoch
            self._items = items
        return self._items

    def _read(self, epoch: int) -> list[Any]:
        """Seed the sampler, and those within it, for an epoch, and read it.

        Nothing here waits for a device: what a sampler yields is on the host.
        """
        epoch_key = key(self._seed, ORDER, epoch)
        with preserved_rng():
            seed_rng(epoch_key)
            for sampler in self._nested:
                set_epoch = getattr(sampler, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)
                generator = getattr(sampler, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(epoch_key)

            items: list[Any] = []
            for item in self._sampler:
                if not isinstance(item, int):  # tensors, numpy's integers, and lists of either
                    item = np.asarray(item).astype(np.int64).tolist()
                items.append(item)
            return items


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
    """Updates of `classes` classes with `samples_per_class` samples each, for metric learning.

    An epoch has about as many samples as the data set.
    """

    def __init__(self, dataset: Any, seed: int, classes: int, samples_per_class: int) -> None:
        targets = classes_of(dataset)
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
        """Draw classes without replacement, and samples of each.

        Samples of a class are drawn with replacement if it has fewer than are needed.
        """
        state = random_state(self.seed, ORDER, epoch, update)
        samples = []
        for label in state.permutation(len(self.members))[: self.classes]:
            members = self.members[label]
            too_few = len(members) < self.samples_per_class
            samples.append(state.choice(members, self.samples_per_class, replace=too_few))
        return np.concatenate(samples).astype(np.int64)
