"""The micro-batches of a data set on their device, from any position in an epoch."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from typing import Any, Literal, NamedTuple

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
from regimen.data.keys import Indices
from regimen.data.loading.device_transforms import DeviceTransforms
from regimen.data.loading.fetch import (
    Collate,
    Fetched,
    Fetcher,
    Skipped,
    Workers,
    collate_of,
    never_interrupted,
    overrides_method,
)
from regimen.data.orders import Sequential
from regimen.data.samplers import (
    OrderedUpdates,
    UpdateSampler,
    as_order,
    default_order,
    replacement_samples,
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


def is_cacheable(kind: type) -> bool:
    """Return whether a class of data sets has `tensors()` that is valid for its samples.

    It is not if a subclass makes its samples in another way.
    """
    return overrides_method(kind, "tensors", "__getitem__", "batch")


def tensor_bytes(samples: Any) -> int:
    """Return the bytes of all tensors of a nested batch."""
    sizes = list[int]()

    def add(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, samples)
    return sum(sizes)


@dataclass(eq=False)
class DeviceCache:
    """A data set cached on the device: per batch only the sample indices are copied.

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
        """Copy the data set to the device; later calls do nothing. Waits for the copy."""
        if self._tried:
            return
        self._tried = True
        samples = self.dataset.tensors()
        if samples is None:
            self._warn("images of several sizes, or that cannot be decoded")
            return
        size = tensor_bytes(samples)
        if size > self.most_bytes:
            self._warn(
                f"its samples take {size} bytes, more than data.cache_bytes={self.most_bytes}"
            )
            return
        self._samples = to_device(samples, self.device, non_blocking=False)
        self.ready = True
        logger.info("data.cache=device: %d bytes on %s", size, self.device)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as a batch on the device, without waiting for it."""
        return index_batch(self._samples, indices, self.device)

    def _warn(self, why: str) -> None:
        name = type(self.dataset).__name__
        logger.warning("warning: data.cache=device: %s stays in host memory: %s", name, why)


@dataclass(eq=False)
class Loader:
    """Load the micro-batches of one rank onto `device`, and apply `transforms` there.

    The arguments down to `multiprocessing_context` are torch's DataLoader's (`timeout` in seconds,
    0 = without end). Those about workers are ignored without workers. `in_order=False` and
    `generator` are not offered: the order is a pure function of the sampler's.

    on_error: "raise" a DataError; "replace" a broken sample by one that (seed, index) determine; or
    "drop" it, for evaluation. More than `max_skipped` different ones are a DataError in any case.
    kept: a cache of the data set on the device. Once it is loaded, micro-batches are gathered from
    it, and no workers are started.
    prefetch: on an accelerator, copy (or gather) and transform a batch on a side stream while the
    batch before it is computed; otherwise this happens when the batch is needed.
    is_undivided: the Trainer that is given the loader decides how an update is split.
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
            raise DataError(
                "data.on_error=skip cannot be kept for a stream, whose samples come once; set "
                "data.on_error=raise"
            )
        self.skipped = list[Skipped]()
        replacements: Sequence[int] | Indices = range(len(self.dataset))
        if self.on_error == "replace":
            replacements = replacement_samples(self.sampler.updates)
        collate_fn = self.collate_fn or collate_of(self.dataset)
        self._fetcher = Fetcher(self.dataset, collate_fn, self.seed, self.on_error, replacements)
        self._pins = self.pin_memory and pins(default_device())
        self._workers: Workers | None = None
        self._epoch_open = False  # an epoch of the workers was begun and has not ended
        self._interrupted: Interrupted = never_interrupted

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

        An undivided loader returns a copy with this split of updates, so that each Trainer has its
        own position in the epoch; any other returns itself. Raises DataError if the loader's
        micro-batches are not those of the Trainer.
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
        # The order alone: a position that a resume has set belongs to the run that was resumed.
        updates = sampler.updates
        order = updates.order if isinstance(updates, OrderedUpdates) else updates
        split = replace(
            sampler,
            updates=order,
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
        fill_cache = getattr(self.dataset, "fill_cache", None)
        if callable(fill_cache):
            fill_cache(self._interrupted)  # before the workers start, so that they share it
        if self.kept is not None and not self._interrupted():
            self.kept.fill()

        if self._epoch_open:
            # The workers still load batches of the epoch before, or hang at one.
            self.close(patient=False)
        source: Iterator[MicroBatch]
        if self.kept is not None and self.kept.ready:
            source = (MicroBatch(None, batch_slice) for batch_slice in batch_slices)
        elif self.num_workers:
            source = self._from_workers(batch_slices)
        else:
            source = map(self._unpack, self._fetcher.load(batch_slices, self._interrupted))

        if self.prefetch and has_streams(self.device):
            yield from prefetch(source, self._prepare, self.device)
        else:
            yield from map(self._prepare, source)

    def set_stop_check(self, interrupted: Interrupted) -> None:
        """End the epoch as soon as `interrupted` returns true.

        It is called between two samples, or once a second while workers load. A sample that is
        being loaded is finished.
        """
        self._interrupted = interrupted

    def close(self, patient: bool = True) -> None:
        """End the workers; those that hang (or all, if not `patient`) are killed."""
        workers = self._workers
        self._workers = None
        self._epoch_open = False
        if workers is not None:
            workers.close(patient)

    def _from_workers(self, batch_slices: Iterator[BatchSlice]) -> Iterator[MicroBatch]:
        if self._workers is None:
            self._workers = Workers(
                self._fetcher,
                self.num_workers,
                2 if self.prefetch_factor is None else self.prefetch_factor,
                self.timeout,
                self.worker_init_fn,
                self.multiprocessing_context,
            )
        workers = self._workers
        self._epoch_open = True
        completed = False
        try:
            yield from map(self._unpack, workers.load(batch_slices, self._interrupted))
            completed = not self._interrupted()
        finally:
            # Unless the loader was closed meanwhile.
            if self._workers is workers:
                self._epoch_open = False
                if not (completed and self.persistent_workers):
                    self.close(patient=completed)

    def _unpack(self, fetched: Fetched) -> MicroBatch:
        """Return a micro-batch; raise its error, or that too many samples were left out."""
        if fetched.failure is not None:
            raise fetched.failure
        for entry in fetched.skipped:
            if all(entry.index != earlier.index for earlier in self.skipped):
                self.skipped.append(entry)
                logger.warning("data.on_error=skip: left out %s", entry.reason)
        if len(self.skipped) > self.max_skipped:
            reasons = "; ".join(entry.reason for entry in self.skipped[:3])
            raise DataError(
                f"{len(self.skipped)} samples could not be loaded, more than "
                f"data.max_skipped={self.max_skipped}: {reasons}"
            )
        batch = fetched.batch
        if self._pins:
            batch = map_leaves(_pinned, batch)
        return MicroBatch(batch, fetched.batch_slice)

    def _prepare(self, micro_batch: MicroBatch) -> MicroBatch:
        """Copy a micro-batch to the device, or gather it there, and apply the transforms."""
        batch_slice = micro_batch.batch_slice
        if self.kept is not None and self.kept.ready:
            batch = self.kept.batch(batch_slice.indices)
        else:
            batch = to_device(micro_batch.batch, self.device, non_blocking=self.non_blocking)
        if self.transforms:
            batch = self.transforms(batch, batch_slice)
        return MicroBatch(batch, batch_slice)

    def skipped_state(self) -> list[list[Any]]:
        """Return the samples that were left out, as plain values for a checkpoint."""
        return [list(astuple(entry)) for entry in self.skipped]

    def load_skipped_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Load the samples that were left out; of two entries with one index the last."""
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
        dataset: Any = ArraySamples(
            as_samples(X, y), torch.get_default_dtype(), in_batches=collate_fn is None
        )
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


class _Prefetched(NamedTuple):
    """A micro-batch whose preparation was launched on a side stream."""

    micro_batch: MicroBatch
    source: MicroBatch  # its pinned memory must stay until the copy is done
    done: torch.Event


def prefetch(
    source: Iterator[MicroBatch], prepare: Callable[[MicroBatch], MicroBatch], device: torch.device
) -> Iterator[MicroBatch]:
    """Prepare each micro-batch on a side stream, before the previous one is yielded.

    The host does not wait: the device's current stream waits for the side stream.
    """
    stream = side_stream(device)
    previous: _Prefetched | None = None
    try:
        for micro_batch in itertools.chain(source, [None]):
            launched = None
            if micro_batch is not None:
                with stream:
                    prepared = prepare(micro_batch)
                    launched = _Prefetched(prepared, micro_batch, stream.record_event())
            if previous is not None:
                current = current_stream(device)
                current.wait_event(previous.done)
                # So that the memory is not used again before the current stream has read it.
                map_tensors(functools.partial(record_stream, current), previous.micro_batch.batch)
                yield previous.micro_batch
            previous = launched
    finally:
        # A batch that was prepared in vain may still read data that are freed from here on.
        current_stream(device).wait_stream(stream)
