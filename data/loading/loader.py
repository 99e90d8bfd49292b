"""The micro-batches of a data set on their device, from any position in an epoch."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from regimen.data.arrays import ArraySamples, as_samples, holds_arrays
from regimen.data.batch import (
    BatchSlice,
    MicroBatch,
    index_batch,
    map_leaves,
    map_tensors,
    to_device,
)
from regimen.data.errors import DataError
from regimen.data.loading.device_transforms import DeviceTransforms
from regimen.data.loading.fetch import (
    Collate,
    Fetched,
    Fetcher,
    Skipped,
    Workers,
    collate,
    never,
    offers,
)
from regimen.data.orders import Sequential
from regimen.data.samplers import (
    OrderedUpdates,
    UpdateSampler,
    as_order,
    default_order,
    own_samples,
)
from regimen.data.sources import Interrupted
from regimen.data.streams import Stream, as_dataset
from regimen.trainer.device import (
    current_stream,
    default_device,
    has_streams,
    pins,
    record_stream,
    side_stream,
)

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


def can_be_kept(kind: type) -> bool:
    """Return whether a data set has `tensors()`, and no subclass another way to a sample."""
    return offers(kind, "tensors", "__getitem__", "batch")


def bytes_of(samples: Any) -> int:
    """Return the bytes of all tensors of a nested batch."""
    sizes = []
    map_leaves(lambda leaf: sizes.append(leaf.nbytes if isinstance(leaf, Tensor) else 0), samples)
    return sum(sizes)


@dataclass(eq=False)
class DeviceCache:
    """All samples of a data set on a device: what travels to it are the numbers of samples.

    `dataset.tensors()` returns all samples as one batch, before any transform: tensors with a row
    for each sample; None if they cannot be one.
    most_bytes: a larger data set stays in host memory, with a warning.
    """

    dataset: Any
    device: torch.device
    most_bytes: int
    ready: bool = False  # whether the data set is on the device
    _tried: bool = False
    _samples: Any = None

    def fill(self) -> None:
        """Copy the data set to the device, once."""
        if self._tried:
            return
        self._tried = True
        samples = self.dataset.tensors()
        size = bytes_of(samples)
        if samples is None or size > self.most_bytes:
            why = f"its samples take {size} bytes, more than data.cache_bytes={self.most_bytes}"
            why = "images of several sizes, or that cannot be decoded" if samples is None else why
            name = type(self.dataset).__name__
            logger.warning("warning: data.cache=device: %s stays in host memory: %s", name, why)
            return
        self._samples, self.ready = to_device(samples, self.device, non_blocking=False), True
        logger.info("data.cache=device: %d bytes on %s", size, self.device)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as a batch on the device, without waiting for it."""
        return index_batch(self._samples, indices, self.device)


@dataclass(eq=False)
class Loader:
    """Load the micro-batches of one rank onto `device`, and apply `transforms` there.

    The arguments down to `multiprocessing_context` are torch's DataLoader's (`timeout` in seconds,
    0 = without end). Those about workers are ignored without workers. `in_order=False` and
    `generator` are not offered: the order is a pure function of the sampler's.

    on_error: "raise" a DataError; "replace" a broken sample by one that (seed, index) determine; or
    "drop" it, for evaluation. More than `max_skipped` different ones are a DataError in any case.
    kept: the data set on the device. Once it is there, micro-batches are gathered from it, and no
    workers are started.
    prefetch: on an accelerator, a batch is copied (or gathered) and transformed on a side stream
    during the computation of the one before it; otherwise when it is needed.
    is_undivided: whether the Trainer that it is given to says how an update is split.
    """

    dataset: Any
    sampler: UpdateSampler
    _: KW_ONLY
    seed: int
    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    timeout: float = 0.0
    worker_init_fn: Callable[[int], object] | None = None
    multiprocessing_context: str | None = None
    on_error: Literal["raise", "replace", "drop"] = "raise"
    max_skipped: int = 0
    kept: DeviceCache | None = None
    device: torch.device = CPU
    transforms: DeviceTransforms | None = None
    non_blocking: bool = True
    prefetch: bool = True
    is_undivided: bool = False

    def __post_init__(self) -> None:
        self.dataset = as_dataset(self.dataset)
        if isinstance(self.dataset, Stream) and self.on_error != "raise":
            why = "cannot be kept for a stream, whose samples come once; set data.on_error=raise"
            raise DataError(f"data.on_error=skip {why}")
        self.skipped = list[Skipped]()
        among_own = self.on_error == "replace"
        others = own_samples(self.sampler.updates) if among_own else range(len(self.dataset))
        form = self.collate_fn or collate
        self._fetcher = Fetcher(self.dataset, form, self.seed, self.on_error, others)
        self._pins = self.pin_memory and pins(default_device())
        self._workers: Workers | None = None
        self._busy = False  # an epoch was begun and has not ended
        self._interrupted: Interrupted = never

    def __len__(self) -> int:
        return len(self.sampler)

    def for_run(
        self,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> "Loader":
        """Return the loader of one process of a run whose model computes on `device` in `dtype`.

        An undivided loader returns a copy that splits its updates so: each Trainer has its own
        place in the epoch. Another returns itself. Raises DataError where its micro-batches are
        not those of the Trainer.
        """
        sampler = self.sampler
        if not self.is_undivided:
            steps = sampler.gradient_accumulation_steps
            if gradient_accumulation_steps not in (1, steps):
                raise DataError(
                    f"gradient_accumulation_steps={gradient_accumulation_steps} of the Trainer's "
                    f"options has no effect on a loader whose UpdateSampler was given {steps}: "
                    "give both the same, or let regimen.loader make the loader, which is told"
                )
            return self
        # What was set by a resume belongs to the run that was resumed.
        updates = sampler.updates
        fresh = updates.order if isinstance(updates, OrderedUpdates) else updates
        split = replace(
            sampler,
            updates=fresh,
            gradient_accumulation_steps=gradient_accumulation_steps,
            rank=rank,
            world_size=world_size,
        )
        dataset = self.dataset
        if isinstance(dataset, ArraySamples) and dtype is not None:
            dataset = replace(dataset, dtype=dtype)
        return replace(self, dataset=dataset, sampler=split, device=device, is_undivided=False)

    @property
    def shuffles(self) -> bool:
        """Whether an epoch reads the samples in another order than that of the data set."""
        order = getattr(self.sampler.updates, "order", None)
        return not isinstance(order, Sequential)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of updates `start` to `stop` of an epoch; none is replayed.

        Starting an epoch ends the one before.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        batch_slices = self.sampler.walk(epoch, start, stop)
        if callable(fill := getattr(self.dataset, "fill_cache", None)):
            fill(self._interrupted)  # before the workers start, so that they share it
        if self.kept is not None and not self._interrupted():
            self.kept.fill()
        if self._busy:  # workers load, or hang at, what nobody needs
            self.close(patient=False)
        if self.kept is not None and self.kept.ready:
            source: Iterator[MicroBatch] = (
                MicroBatch(None, batch_slice) for batch_slice in batch_slices
            )
        elif self.num_workers:
            source = self._from_workers(batch_slices)
        else:
            source = map(self._received, self._fetcher.load(batch_slices, self._interrupted))
        if self.prefetch and has_streams(self.device):
            yield from one_ahead(source, self._moved, self.device)
        else:
            yield from map(self._moved, source)

    def heed(self, interrupted: Interrupted) -> None:
        """End the epoch as soon as `interrupted` returns true.

        It is called between two samples, or once a second while workers load. A sample that is
        being loaded is finished.
        """
        self._interrupted = interrupted

    def close(self, patient: bool = True) -> None:
        """End the workers; those that hang (or all, if not `patient`) are killed."""
        workers, self._workers, self._busy = self._workers, None, False
        if workers is not None:
            workers.close(patient)

    def _from_workers(self, batch_slices: Iterator[BatchSlice]) -> Iterator[MicroBatch]:
        self._workers = workers = self._workers or Workers(
            self._fetcher,
            self.num_workers,
            2 if self.prefetch_factor is None else self.prefetch_factor,
            self.timeout,
            self.worker_init_fn,
            self.multiprocessing_context,
        )
        self._busy, ended = True, False
        try:
            yield from map(self._received, workers.load(batch_slices, self._interrupted))
            ended = not self._interrupted()
        finally:
            if self._workers is workers:
                self._busy = False
                if not (ended and self.persistent_workers):
                    self.close(patient=ended)

    def _received(self, fetched: Fetched) -> MicroBatch:
        """Return a micro-batch; raise its error, or that too many samples were left out."""
        if fetched.failure is not None:
            raise fetched.failure
        for entry in fetched.skipped:
            if all(entry.index != known.index for known in self.skipped):
                self.skipped.append(entry)
                logger.warning("data.on_error=skip: left out %s", entry.reason)
        if (many := len(self.skipped)) > self.max_skipped:
            most = f"{many} samples could not be loaded, more than data.max_skipped="
            listed = "; ".join(entry.reason for entry in self.skipped[:3])
            raise DataError(f"{most}{self.max_skipped}: {listed}")
        batch = map_leaves(_pinned, fetched.batch) if self._pins else fetched.batch
        return MicroBatch(batch, fetched.batch_slice)

    def _moved(self, micro: MicroBatch) -> MicroBatch:
        if self.kept is not None and self.kept.ready:
            batch = self.kept.batch(micro.batch_slice.indices)
        else:
            batch = to_device(micro.batch, self.device, non_blocking=self.non_blocking)
        if self.transforms:
            batch = self.transforms(batch, micro.batch_slice)
        return MicroBatch(batch, micro.batch_slice)

    def skipped_state(self) -> list[list[Any]]:
        """Return the samples that were left out, as plain values for a checkpoint."""
        return [list(astuple(entry)) for entry in self.skipped]

    def load_skipped_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Load the samples that were left out."""
        self.skipped[:] = {entry[0]: Skipped(*entry) for entry in state}.values()


def loader(
    X: Any,  # noqa: N803 (scikit-learn's name)
    y: Any = None,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    sampler: Any = None,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    **options: Any,
) -> Loader:
    """Return a loader whose order, workers and place in an epoch are exact, for a Trainer.

    X: an array, a tensor, a pandas DataFrame or a dict of them, each with a row for each sample; or
    a data set with `__len__` and `__getitem__`. Rows go with those of `y` by their position.
    Floating numbers become the model's type batch by batch, a DataFrame's columns floating numbers,
    and whole numbers of y int64. Nothing is copied: leave the arrays as they are while training.
    y: the targets [n] or [n, ...]; None for inputs alone, and for a data set, which has its own.
    batch_size: samples of an update; of a loader to validate, of a batch. The Trainer's
    `gradient_accumulation_steps` and its processes split it.
    shuffle, seed: the order is a function of (seed, epoch); False: as the samples stand, which is
    what a validation needs.
    sampler: an order, or a torch sampler of all samples, which takes the place of `shuffle`.
    options: further arguments of torch's DataLoader, as in `Loader`: `pin_memory`,
    `persistent_workers`, `prefetch_factor`, `timeout`, `worker_init_fn`, ...

    Raises DataError for what is no data, or not of one length.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"loader: batch_size={batch_size!r} is no number of samples, 1 or more")
    if y is not None and not (holds_arrays(X) or isinstance(X, list | tuple)):
        raise DataError(
            f"loader: X is a {type(X).__name__}, no array: a data set has its own targets, so "
            "leave y out"
        )
    if y is not None or holds_arrays(X):
        samples = as_samples(X, y)
        in_batches = collate_fn is None
        dataset: Any = ArraySamples(samples, torch.get_default_dtype(), in_batches)
    elif callable(getattr(X, "__getitem__", None)) or callable(getattr(X, "__iter__", None)):
        dataset = as_dataset(X)
    else:
        raise DataError(
            f"loader: X is a {type(X).__name__}: give an array, a tensor, a DataFrame, or a data "
            "set with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(f"loader: the data set {type(X).__name__} has no __len__")
    order = default_order(dataset, seed, shuffle) if sampler is None else as_order(sampler, seed)
    return Loader(
        dataset,
        UpdateSampler(order, batch_size=batch_size, drop_last=drop_last),
        seed=seed,
        num_workers=num_workers,
        collate_fn=collate_fn,
        is_undivided=True,
        **options,
    )


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def one_ahead(
    source: Iterator[MicroBatch], move: Callable[[MicroBatch], MicroBatch], device: torch.device
) -> Iterator[MicroBatch]:
    """Move each micro-batch on a side stream, before the previous one is yielded."""
    stream, waiting = side_stream(device), None
    try:
        for micro in itertools.chain(source, [None]):
            launched = None
            if micro is not None:
                with stream:
                    # The pinned source is kept alive until the copy is done.
                    launched = move(micro), micro, stream.record_event()
            if waiting is not None:
                moved, _, done = waiting
                current = current_stream(device)
                current.wait_event(done)
                map_tensors(functools.partial(record_stream, current), moved.batch)
                yield moved
            waiting = launched
    finally:  # what was moved in vain may still read data that are freed from here on
        current_stream(device).wait_stream(stream)
