"""The samples of each update: chosen by an order or a sampler, split over ranks and devices."""

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

# From this size on an order is computed by position: in memory it would take 0.8 GB.
HUGE = 100_000_000


class Updates(Protocol):
    """The samples of each update: of `loader.batch_sampler`, or an order split by size.

    As an order it may say `repeats = False`.
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
            few = f"{len(order)} samples are fewer than loader.batch_size={batch_size}"
            raise DataError(f"loader.drop_last leaves no update: {few}; lower it or drop none")
        self.order = order
        self.batch_size = batch_size
        self._last = len(order) // batch_size * batch_size if drop_last else len(order)
        self._drop_last = drop_last
        self._epoch: int | None = None
        self._view: Any = None
        self._resumed = (-1, 0, 0)  # the epoch of a resume, its first update, the samples before it

    @property
    def repeats(self) -> bool:
        """Whether the order may draw a sample twice in an epoch."""
        return bool(getattr(self.order, "repeats", True))

    def __len__(self) -> int:
        return -(-self._last // self.batch_size)

    def resume(self, epoch: int, seen: int, length: int) -> int:
        """Go on with an epoch of `length` updates behind its first `seen` samples.

        They may have been seen in updates of another size. Returns the number of the next update:
        what is left has the last numbers of the epoch, maybe none.
        """
        span = min(self._last, length * self.batch_size)
        left = max(0, span - seen)
        updates = left // self.batch_size if self._drop_last else -(-left // self.batch_size)
        self._resumed = epoch, length - updates, seen
        return length - updates

    def samples(self, epoch: int, update: int) -> Indices:
        """Return the sample indices of one update; the epoch's order is computed once."""
        if self._epoch != epoch:
            self._epoch, self._view = epoch, self.order(epoch)
        first = update * self.batch_size
        resumed, begin, seen = self._resumed
        if epoch == resumed and update >= begin:
            first = seen + (update - begin) * self.batch_size
        part: Indices = self._view[first : min(first + self.batch_size, self._last)]
        return part


@dataclass(eq=False)
class UpdateSampler:
    """Yield each rank's micro-batches of any updates, without replaying earlier ones.

    The n samples of an update are split, as by `numpy.array_split`, into
    `gradient_accumulation_steps * world_size` slices; slice (m, r) is number m * world_size + r.
    Micro-batches whose rank-0 slice is empty are left out, so all ranks have the same number.
    """

    updates: Any  # Updates, or an Order that is cut into them
    _: KW_ONLY
    batch_size: int  # of an order
    drop_last: bool = False
    gradient_accumulation_steps: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if callable(self.updates):
            self.updates = OrderedUpdates(self.updates, self.batch_size, self.drop_last)
        self._may_repeat = bool(getattr(self.updates, "repeats", True))
        self._counted_epoch: int | None = None
        self._occurrences: Indices | None = None  # of all samples of that epoch
        self._first = np.zeros(1, np.int64)  # the place of each update's first sample

    def __len__(self) -> int:
        return len(self.updates)

    @property
    def samples(self) -> int | None:
        """The samples of an epoch; None where whole updates are given."""
        return len(self.updates.order) if isinstance(self.updates, OrderedUpdates) else None

    def resume(self, epoch: int, seen: int, length: int) -> int | None:
        """Go on behind `seen` samples (`OrderedUpdates.resume`); None where updates are given."""
        if isinstance(self.updates, OrderedUpdates):
            return self.updates.resume(epoch, seen, length)
        return None

    def batch_slices(self, epoch: int, update: int) -> list[BatchSlice]:
        """Return this rank's micro-batches of an update, in execution order."""
        indices = self.updates.samples(epoch, update).tolist()
        occurrences = self._occurrences_of(epoch, update)
        total = len(indices)
        parts = self.gradient_accumulation_steps * self.world_size
        size, extra = divmod(total, parts)
        micro_batches = -(-min(total, parts) // self.world_size)
        batch_slices = []
        for m in range(micro_batches):
            number = m * self.world_size + self.rank
            first = number * size + min(number, extra)
            own = tuple(indices[first : first + size + (number < extra)])
            some, start = (own, first) if own else ((indices[0],), 0)
            again = tuple(occurrences[start : start + len(some)])
            # Where none was drawn before, as in most orders, a slice carries no numbers.
            again = again if any(again) else ()
            place = (start, total, m, micro_batches, epoch, update)
            batch_slices.append(BatchSlice(some, len(own), *place, again))
        return batch_slices

    def _occurrences_of(self, epoch: int, update: int) -> list[int]:
        """Return how often the epoch drew each sample of an update before it; empty for never.

        That is a function of the epoch's whole order, not of what was trained on: a resume in the
        middle of an epoch, and every process, finds the same.
        """
        if not self._may_repeat:
            return []
        if self._counted_epoch != epoch:
            every = [self.updates.samples(epoch, number) for number in range(len(self.updates))]
            self._first = np.cumsum([0, *map(len, every)])
            self._occurrences = occurrences_in(np.concatenate(every))
            self._counted_epoch = epoch
        if self._occurrences is None:
            return []
        found: list[int] = self._occurrences[self._first[update] : self._first[update + 1]].tolist()
        return found

    def walk(self, epoch: int, start: int, stop: int) -> Iterator[BatchSlice]:
        """Yield this rank's slices of updates `start` to `stop` of an epoch."""
        for update in range(start, stop):
            yield from self.batch_slices(epoch, update)


def default_order(dataset: Any, seed: int, shuffle: bool = True) -> Order:
    """Return the order of a data set without a sampler; a stream or a mixture has its own."""
    if callable(own := getattr(dataset, "order", None)):
        ordered: Order = own(seed, shuffle)
        return ordered
    if not shuffle or isinstance(dataset, Stream):
        return Sequential(len(dataset))
    return LowMemory(dataset, seed) if len(dataset) >= HUGE else Shuffled(len(dataset), seed)


def as_order(sampler: Any, seed: int) -> Order:
    """Return an order: `sampler` itself if it is one, else the indices it yields.

    Each epoch, `set_epoch` is called, the sampler's `generator` and the global generators are
    seeded by (seed, epoch), and it is read once. A sampler with random state elsewhere cannot be
    repeated and is refused.
    """
    own = callable(sampler) and hasattr(sampler, "__len__")
    return sampler if own else SamplerOrder(sampler, seed)


def as_updates(batch_sampler: Any, seed: int) -> Updates:
    """Return updates: `batch_sampler` itself if it makes them, else the batches it yields."""
    return batch_sampler if hasattr(batch_sampler, "samples") else GivenBatches(batch_sampler, seed)


def own_samples(updates: Updates) -> Sequence[int] | Indices:
    """Return the samples that may replace a broken one: those of epoch 0."""
    everything = (Sequential, Shuffled, LowMemory)
    if isinstance(updates, OrderedUpdates) and isinstance(updates.order, everything):
        return range(len(updates.order))
    return np.unique(np.concatenate([updates.samples(0, u) for u in range(len(updates))]))


class _Sampler:
    """What a user's sampler yields in an epoch, read once: numbers, or lists of them."""

    key = "loader.sampler"

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._nested = [sampler]
        while (inner := getattr(self._nested[-1], "sampler", None)) is not None:
            self._nested.append(inner)
        if any(isinstance(p, DistributedSampler) and p.num_replicas > 1 for p in self._nested):
            raise DataError(
                f"{self.key}: DistributedSampler is not needed, an update's samples are shared "
                "out over the devices anyway; use a sampler of all samples"
            )
        self._epoch, self._items = 0, self._read(0)
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
                counts = f"{len(items)} in epoch {epoch}, but {len(self)} in epoch {self._epoch}"
                why = "the number must not change, for the schedule and a resume count on it"
                raise DataError(f"{self.key} gives {counts}: {why}")
            self._epoch, self._items = epoch, items
        return self._items

    def _read(self, epoch: int) -> list[Any]:
        """Seed the sampler, and those within it, for an epoch, and read it."""
        epoch_key = key(self._seed, ORDER, epoch)
        with preserved_rng():
            seed_rng(epoch_key)
            for part in self._nested:
                if callable(tell := getattr(part, "set_epoch", None)):
                    tell(epoch)
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(epoch_key)
            return [
                item if isinstance(item, int) else np.asarray(item).astype(np.int64).tolist()
                for item in self._sampler
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
        targets = classes_of(dataset)
        self.members = [np.flatnonzero(targets == label) for label in np.unique(targets)]
        if classes > len(self.members):
            few = f"there are only {len(self.members)}"
            raise DataError(f"loader.batch_sampler.classes={classes}: {few}")
        self.seed = seed
        self.classes = classes
        self.samples_per_class = samples_per_class
        self._updates = max(1, len(targets) // (classes * samples_per_class))

    def __len__(self) -> int:
        return self._updates

    def samples(self, epoch: int, update: int) -> Indices:
        """Draw classes without replacement, and samples of each; again if it has too few."""
        state = random_state(self.seed, ORDER, epoch, update)
        drawn = []
        for label in state.permutation(len(self.members))[: self.classes]:
            members = self.members[label]
            few = len(members) < self.samples_per_class
            drawn.append(state.choice(members, self.samples_per_class, replace=few))
        return np.concatenate(drawn).astype(np.int64)
