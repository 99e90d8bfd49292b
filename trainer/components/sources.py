"""Sources of updates: our loaders or any iterable of batches, read until a signal comes."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from regimen.data.batch import BatchSlice, MicroBatch, map_leaves, rebuild
from regimen.trainer import fast
from regimen.trainer.errors import UserCodeError, qualified_name
from regimen.trainer.rng import derived_seed
from regimen.trainer.state import TrainState
from regimen.trainer.task import by_stage, first_tensor, tensors_of

T = TypeVar("T")
# torch's samplers that draw all they draw from their `generator`.
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class PlainBatches:
    """Read any iterable of batches, one for each update, split sample by sample.

    A batch has parts, such as inputs and targets. A part is a tensor with a row for each sample, a
    list with an item for each, such as its boxes, or a container of parts. Or a batch is the list
    of its samples, each of several parts, where a collate function returns what it is given.

    For a plain DataLoader on one device. Where its samplers are torch's, the order of an epoch is a
    function of (`seed`, epoch), and a resume loads the rest of an epoch only. Any other iterable is
    read from its begin, and the batches before the position are dropped. That is exact if it
    repeats its order; `repeats` says whether it is known to.
    """

    def __init__(self, loader: Any, gradient_accumulation_steps: int = 1, seed: int = 0) -> None:
        self._loader = loader
        self._steps = gradient_accumulation_steps
        self._seed = seed
        self._by_index = (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
        )
        self._rest = _Rest()
        self._copy: Any = None  # of the DataLoader: loads what `_rest` names
        if self._by_index:
            self.repeats = _repeats(_indices_of(loader))
        else:
            self.repeats = _repeats(loader)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def shuffles(self) -> bool:
        """Whether a sampler of torch's draws the order."""
        order = _indices_of(self._loader) if isinstance(self._loader, DataLoader) else None
        return isinstance(getattr(order, "sampler", order), _SHUFFLING)

    def epoch(self, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the updates `start` to `stop` of an epoch."""
        batches = self._batches(epoch, start, stop)
        for update, (numbers, batch) in enumerate(batches, start):
            total = _count_samples(batch, len(numbers))
            # A collate function may leave samples out, or make several of one.
            indices = tuple(numbers) if len(numbers) == total else ()
            steps = max(1, min(self._steps, total))
            if steps == 1:
                yield MicroBatch(batch, BatchSlice(indices, total, 0, total, 0, 1, epoch, update))
                continue
            bounds = [total * m // steps for m in range(steps + 1)]
            for m, (low, high) in enumerate(itertools.pairwise(bounds)):
                batch_slice = BatchSlice(
                    indices[low:high], high - low, low, total, m, steps, epoch, update
                )
                yield MicroBatch(_samples_of(batch, batch_slice), batch_slice)

    def _batches(
        self, epoch: int, start: int, stop: int | None
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """Yield each batch with the indices of its samples in the data set, () if not known."""
        loader = self._loader
        if not self._by_index:
            _tell_epoch(loader, epoch)
            for batch in itertools.islice(iter(loader), start, stop):
                yield (), batch
            return
        if loader.generator is None and not start:
            # A DataLoader's own iterator draws a seed here. With this draw the training has the
            # same random numbers as a loop by hand; such a loop does not know the rest of an epoch.
            torch.empty((), dtype=torch.int64).random_()
        rest = itertools.islice(_keyed(_indices_of(loader), self._seed, epoch), start, stop)
        if loader.num_workers or loader.pin_memory:
            yield from self._from_torch(rest, epoch)
        else:
            yield from fast.load_batches(loader, rest)

    def _from_torch(self, rest: Iterator[Any], epoch: int) -> Iterator[tuple[Sequence[int], Any]]:
        """Let a copy of the DataLoader, with its workers, load what is left of an epoch."""
        loader = self._loader
        has_batches = loader.batch_sampler is not None
        if self._copy is None:
            self._copy = copy.copy(loader)
            attribute = "batch_sampler" if has_batches else "sampler"
            # `vars`, because the DataLoader's `__setattr__` refuses it. The caller's persistent
            # workers stay the caller's, and so does the generator, from which the workers' seeds
            # are drawn.
            vars(self._copy).update({attribute: self._rest, "_iterator": None})
            self._copy.generator = torch.Generator()
        self._copy.generator.manual_seed(derived_seed(self._seed, "workers", epoch))
        self._rest.indices, order = itertools.tee(rest)
        knows_indices = has_batches and getattr(loader, "in_order", True)
        for indices, batch in zip(order, self._copy, strict=True):
            yield (indices if knows_indices else ()), batch

    def close(self) -> None:
        """End the workers of the copy; the iterable itself belongs to the caller."""
        self._copy = None


def _parts_of(batch: Any) -> list[Any]:
    if isinstance(batch, list | tuple):
        return list(batch)
    return list(batch.values()) if isinstance(batch, Mapping) else [batch]


def _is_list_of_samples(part: Any) -> bool:
    """Return whether a part is a list of dicts or numbers, one for each sample.

    Of tensors, lists and texts there may also be one for each input of the model.
    """
    if not isinstance(part, list | tuple) or not part or hasattr(part, "_fields"):
        return False
    if isinstance(part[0], Mapping):
        return all(isinstance(item, Mapping) for item in part)
    return not isinstance(part[0], Tensor | list | tuple | str)


def _are_samples(batch: Any, count: int) -> bool:
    """Return whether a batch of `count` samples is the list of them, and not of its parts.

    Samples have one form, and parts hardly do: inputs differ from targets. What could be either,
    such as tensors, or parts of one form with a row or an item for each sample, counts as parts.
    """
    if not isinstance(batch, list | tuple) or hasattr(batch, "_fields") or len(batch) != count:
        return False
    if len({_form_of(sample) for sample in batch}) > 1:
        return False
    first = batch[0]
    if isinstance(first, Tensor):
        return False
    if isinstance(first, list | tuple) and len(first) == count:
        return len({_form_of(item) for item in first}) > 1
    leaves = list[Any]()
    map_leaves(leaves.append, batch)
    return not all(isinstance(x, Tensor) and x.ndim and len(x) == count for x in leaves)


def _form_of(value: Any) -> Any:
    """Return what values of one kind have in common: keys, types, dimensions; no sizes."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return frozenset(value)
    if isinstance(value, list | tuple):
        return tuple(_form_of(item) for item in value)
    return type(value)


def _count_samples(batch: Any, asked: int) -> int:
    """Return the number of samples in a batch; `asked`: how many were loaded, 0 if unknown."""
    parts = _parts_of(batch)
    counts = []
    for part in parts:
        if isinstance(part, Tensor) and part.ndim:
            rows = len(part)
            if asked in (0, rows):
                return rows  # as of nearly all batches
            counts.append(rows)
    if asked and _are_samples(batch, asked):
        return asked
    counts += [len(part) for part in parts if _is_list_of_samples(part)]
    tensor = first_tensor(batch)
    if tensor is not None and tensor.ndim:
        counts.append(len(tensor))
    counts += [len(part) for part in parts if isinstance(part, list | tuple)]
    return asked if asked in counts else next(iter(counts), 1)


def _samples_of(batch: Any, batch_slice: BatchSlice) -> Any:
    """Return the samples of a micro-batch. Raises UserCodeError for other tensors."""
    total = batch_slice.total
    own = slice(batch_slice.start, batch_slice.start + batch_slice.count)
    if _are_samples(batch, total):
        return batch[own]
    has_lists = any(_is_list_of_samples(part) and len(part) == total for part in _parts_of(batch))

    def split(part: Any) -> Any:
        if isinstance(part, Tensor) and part.ndim:
            if len(part) != total:
                raise UserCodeError(
                    f"train_loader: a batch of {total} samples holds a tensor {list(part.shape)}, "
                    "which gradient_accumulation_steps cannot split: let collate_fn return tensors "
                    "with a row, or lists with an item, for each sample, or give regimen.loader"
                )
            return part[own]
        if isinstance(part, Mapping):
            return {name: split(value) for name, value in part.items()}
        if not isinstance(part, list | tuple):
            return part
        if part is not batch and len(part) == total and not hasattr(part, "_fields"):
            tensors = list(tensors_of(part))
            are_columns = tensors and all(t.ndim and len(t) == total for t in tensors)
            if has_lists or not are_columns:
                return part[own]
        return rebuild(part, [split(item) for item in part])

    return split(batch)


class _Rest:
    """The sampler of a copied DataLoader: the indices of the rest of an epoch."""

    def __init__(self) -> None:
        self.indices: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


def _indices_of(loader: Any) -> Any:
    """Return a DataLoader's batch sampler; its sampler if it does not batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _repeats(source: Any) -> bool:
    """Return whether a source is known to give an epoch's items again in the same order."""
    if type(source) is BatchSampler:
        return _repeats(source.sampler)
    if type(source) in (SequentialSampler, *_SHUFFLING):
        return True
    # A sequence draws nothing; samplers that draw have `set_epoch` by convention.
    return hasattr(source, "__getitem__") or hasattr(source, "set_epoch")


def _keyed(sampler: Any, seed: int, epoch: int) -> Any:
    """Return a copy of a sampler whose order is a function of (seed, epoch).

    One that is not torch's is returned itself.
    """
    if type(sampler) is BatchSampler:
        batches = copy.copy(sampler)
        batches.sampler = _keyed(sampler.sampler, seed, epoch)
        return batches
    if type(sampler) in _SHUFFLING:
        keyed = copy.copy(sampler)
        keyed.generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
        return keyed
    _tell_epoch(sampler, epoch)
    return sampler


def _tell_epoch(source: Any, epoch: int) -> None:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)


def order_remark(source: Any) -> str | None:
    """Say that the rest of an epoch is not known after a resume; None where it is."""
    if not isinstance(source, PlainBatches) or source.repeats:
        return None
    loader = source._loader
    name = qualified_name(loader)
    if source._by_index:
        sampler = _indices_of(loader)
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        name = f"the sampler {qualified_name(sampler)}"
    elif isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        name = f"the IterableDataset {qualified_name(loader.dataset)}"
    return (
        f"train_loader: whether {name} repeats its order is not known: a training that is "
        "interrupted within an epoch, and goes on, may see some samples of it twice and others not "
        "at all. A DataLoader with shuffle=True, or a sampler with set_epoch(epoch), is exact"
    )


def as_source(loader: Any, name: str, gradient_accumulation_steps: int = 1, seed: int = 0) -> Any:
    """Return `loader` itself if it knows epochs and updates, as ours do, else wrap it.

    `seed`: with the epoch, of the order in which a plain DataLoader shuffles. Raises TypeError,
    with the argument's `name`, where it can be read only once or not at all, or has single samples.
    """
    if hasattr(loader, "epoch"):
        return loader
    if isinstance(loader, Iterator):
        raise TypeError(
            f"{name} is an iterator ({type(loader).__name__}), which is read only once: give what "
            "it is made from, such as a DataLoader, a list of batches, or an object whose "
            "__iter__ starts again"
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name} is not an iterable of batches: {type(loader).__name__}")
    if _is_of_samples(loader):
        raise TypeError(
            f"{name} is a data set ({type(loader).__name__}) of single samples, and batches are "
            "needed: give torch.utils.data.DataLoader(data_set, batch_size=64, shuffle=True), for "
            "tensors with TensorDataset(inputs, targets) as data set"
        )
    return PlainBatches(loader, gradient_accumulation_steps, seed)


def _is_of_samples(given: Any) -> bool:
    """Return whether a data set was given for a loader, or a pair of inputs and targets."""
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        return True
    if hasattr(given, "to_numpy"):  # a DataFrame of pandas or Polars
        return True
    if not hasattr(given, "__getitem__") or not hasattr(given, "__len__") or not len(given):
        return False
    if isinstance(given, tuple) and len(given) == 2:
        inputs, targets = (tuple(getattr(part, "shape", ())) for part in given)
        if inputs[:1] and inputs[:1] == targets[:1] and inputs != targets:
            return True
    if isinstance(given, Mapping):
        return False
    try:
        first = given[0]
    except (LookupError, TypeError):  # its items are not counted from 0
        return False
    if not isinstance(first, list | tuple) or len(first) != 2:
        return False
    target = first[1]  # one number, where a batch has several
    return isinstance(target, int | float) or (isinstance(target, Tensor) and not target.ndim)


def as_val_sources(given: Any, limit: int | float | None, seed: int) -> dict[str, Any]:
    """Return the loaders of validation by stage: `val`, or `val/<set>` for each of several.

    Entries that are None are left out, and all of them with a `limit` of 0 batches.
    """
    if limit == 0:
        return {}
    return {
        stage: as_source(loader, "val_loader", 1, seed)
        for stage, loader in by_stage(given).items()
        if loader is not None
    }


def in_updates(
    stream: Iterable[MicroBatch], batches_each: int, convert: Callable[[Any], Any]
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each update, which consists of `batches_each` batches.

    One that is not whole at the end is left out. `convert`: applied to each batch as it comes.
    """
    group: list[MicroBatch] = []
    batches = 0  # that are whole, in `group`
    for micro_batch in stream:
        micro_batch.batch = convert(micro_batch.batch)
        group.append(micro_batch)
        batch_slice = micro_batch.batch_slice
        if batch_slice.micro_batch + 1 < batch_slice.micro_batches:
            continue
        batches += 1
        if batches == batches_each:
            yield group
            group = []
            batches = 0


class StopAwareReader:
    """Read streams until a signal asks for a stop.

    The signal's handler raises nothing, as it may interrupt code that loads data. Sources call
    `should_stop` between two samples and while they wait for a worker. Only a process that is
    `alone` stops at once: several processes agree at a boundary.
    """

    def __init__(self, state: TrainState, alone: bool) -> None:
        self._state = state
        self._alone = alone
        self._is_reading = False

    def should_stop(self) -> bool:
        """Return whether a signal ends the current wait; False outside of one."""
        return self._is_reading and self._alone and self._state.signal is not None

    def connect(self, source: Any) -> Any:
        """Let a source call `should_stop`, if it supports that; return it."""
        if hasattr(source, "set_stop_check"):
            source.set_stop_check(self.should_stop)
        return source

    def next(self, stream: Iterator[T]) -> T | None:
        """Return the stream's next item; None at its end, or when a signal ends the wait."""
        self._is_reading = True
        try:
            if self.should_stop():
                item = None
            else:
                item = next(stream, None)
            if not self.should_stop():
                return item
            # A batch that arrived meanwhile is loaded again after the resume.
            self._state.apply_stop()
            return None
        finally:
            self._is_reading = False
