"""Fetch one micro-batch, in the main process or in a worker: keyed, collated, errors as values."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from data.batch import Piece, map_leaves
from data.errors import DataError, UnreadableError, is_fault, reason
from data.keys import REPLACEMENT, SAMPLE, key, preserved_rng, seed_rng
from data.loading.workers import memory_error
from data.updates import Indices

Collate = Callable[[Sequence[Any]], Any]
REPLACEMENTS = 16  # attempts to replace a broken sample


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be loaded and was left out."""

    index: int
    path: str | None
    reason: str


@dataclass(slots=True)
class Fetched:
    """A worker's result: a batch, or the error that the main process raises.

    Exceptions are sent as values, since torch rewrites the message of one raised in a worker.
    """

    batch: Any
    piece: Piece
    skipped: tuple[Skipped, ...] = ()
    failure: Exception | None = None
    broken_off: bool = False  # a signal came: no batch follows

    def pin_memory(self) -> "Fetched":
        """Pin the batch's tensors; torch's own walk would turn tuples into lists."""
        self.batch = map_leaves(_pin, self.batch)
        return self


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


class _BrokenOff(Exception):  # noqa: N818 (nothing went wrong)
    """The piece is no longer needed. Raised between two samples, outside users' code."""


def never() -> bool:
    """Return False: nothing interrupts the loading."""
    return False


class Fetcher:
    """The map-style data set that the DataLoader sees: one item is a whole piece.

    on_error: "raise", "replace" (by a sample that the broken one's index and the seed determine:
    the update stays whole) or "drop" (the piece shrinks: evaluation counts nothing twice).
    `replacements`: the samples that may stand in for others; None: all of the data set.
    `watch` is shared with the workers: each writes the index it is loading, which the error of a
    lost worker names.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        seed: int,
        on_error: str,
        watch: torch.Tensor,
        replacements: Indices | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.on_error = on_error
        self.watch = watch
        self.interrupted: Callable[[], bool] = never  # asked before each sample
        self.replacements = replacements
        self._skipped: list[Skipped] = []
        self._slot: int | None = None  # of this process in `watch`

    def __getitems__(self, piece: Piece) -> Fetched:
        try:
            return self._fetch(piece)
        except _BrokenOff:
            return Fetched(None, piece, broken_off=True)
        except BaseException as error:
            if not is_fault(error):
                raise
            return Fetched(None, piece, failure=memory_error(error) or self._failure(error, piece))

    def name(self, index: int) -> str:
        """Name a sample by its index and, where there is one, its file."""
        path = path_of(self.dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"

    def _fetch(self, piece: Piece) -> Fetched:
        self._tell_epoch(piece.epoch)
        batch = self._whole_batch(piece)
        if batch is not None:
            return Fetched(batch, piece)
        self._skipped = []
        with preserved_rng():
            samples, piece = self._samples(piece)
            batch = self.collate(samples)
        return Fetched(batch, piece, tuple(self._skipped))

    def _tell_epoch(self, epoch: int) -> None:
        """Pass the epoch to a data set that has `set_epoch`, in this process."""
        if callable(begin := getattr(self.dataset, "begin_epoch", None)):
            begin(epoch, key(self.seed, SAMPLE, epoch))
        elif callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)

    def _whole_batch(self, piece: Piece) -> Any:
        """Return a whole batch from the data set's method `batch`, if it has one."""
        batch = whole_batches(self.dataset)
        return None if batch is None else batch(piece.indices)

    def _samples(self, piece: Piece) -> tuple[list[Any], Piece]:
        if self.on_error == "drop":
            return self._kept(piece)
        return [self._sample(index, piece.epoch) for index in piece.indices], piece

    def _sample(self, index: int, epoch: int) -> Any:
        """Load one sample or its replacement, which is drawn for with the sample's own key."""
        candidate = index
        for attempt in range(REPLACEMENTS):
            seed_rng(key(self.seed, SAMPLE, epoch, index))
            try:
                return self._load(candidate)
            except DataError as error:
                self._skip(candidate, error)
            candidate = self._replacement(key(self.seed, REPLACEMENT, index, attempt))
        raise DataError(f"sample {index} and {REPLACEMENTS - 1} replacements could not be loaded")

    def _replacement(self, drawn: int) -> int:
        if self.replacements is None:
            return drawn % len(self.dataset)
        return int(self.replacements[drawn % len(self.replacements)])

    def _kept(self, piece: Piece) -> tuple[list[Any], Piece]:
        """Load the samples that can be loaded; an empty piece gets a sample and `count` 0."""
        samples, kept = [], []
        for index in piece.indices:
            seed_rng(key(self.seed, SAMPLE, piece.epoch, index))
            try:
                samples.append(self._load(index))
            except DataError as error:
                self._skip(index, error)
            else:
                kept.append(index)
        if len(kept) == len(piece.indices):
            return samples, piece
        if not kept:
            return [self._stand_in(piece)], replace(piece, indices=piece.indices[:1], count=0)
        return samples, replace(piece, indices=tuple(kept), count=len(kept) if piece.count else 0)

    def _stand_in(self, piece: Piece) -> Any:
        """Return a sample that counts for nothing: of files without labels all may be broken."""
        own = getattr(self.dataset, "stand_in", None)
        return own() if callable(own) else self._sample(piece.indices[0], piece.epoch)

    def _load(self, index: int) -> Any:
        if self.interrupted():
            raise _BrokenOff
        if self._slot is None:
            worker = get_worker_info()
            self._slot = 0 if worker is None else worker.id
        self.watch[self._slot] = index
        try:
            return self.dataset[index]
        except BaseException as error:
            if memory_error(error) or not is_fault(error):
                raise
            raise self._at_sample(error, index) from error

    def _skip(self, index: int, error: DataError) -> None:
        if self.on_error == "raise":
            raise error
        self._skipped.append(Skipped(index, path_of(self.dataset, index), str(error)))

    def _at_sample(self, error: BaseException, index: int) -> DataError:
        text = str(error) if isinstance(error, DataError) else reason(error)
        if isinstance(error, UnreadableError) and self.on_error == "raise":
            text = f"{text}; data.on_error=skip leaves such samples out"
        path = path_of(self.dataset, index)
        named = path is not None and path in text
        return DataError(f"sample {index}: {text}" if named else f"{self.name(index)}: {text}")

    def _failure(self, error: BaseException, piece: Piece) -> DataError:
        """Return a DataError for an exception, with the traceback as a note."""
        if isinstance(error, DataError):
            failure = DataError(str(error))
        else:
            failure = DataError(
                f"samples {short(piece.indices)} cannot be put into a batch (do their shapes and "
                f"types agree? see transforms, loader.collate_fn): {reason(error)}"
            )
        failure.add_note(traceback.format_exc())
        return failure


def whole_batches(dataset: Any) -> Callable[[Sequence[int]], Any] | None:
    """Return a data set's method `batch`, unless a subclass overrides `__getitem__` after it."""
    batch: Callable[[Sequence[int]], Any] | None = getattr(dataset, "batch", None)
    for kind in type(dataset).__mro__:
        if "batch" in vars(kind):
            return batch
        if "__getitem__" in vars(kind):
            return None
    return batch


def path_of(dataset: Any, index: int) -> str | None:
    """Return the file of a sample, if its data set can tell."""
    path = getattr(dataset, "path", None)
    return path(index) if callable(path) else None


def short(indices: Sequence[int], most: int = 6) -> str:
    """List a few indices and the number of all."""
    shown = ", ".join(str(index) for index in indices[:most])
    return shown if len(indices) <= most else f"{shown}, ... ({len(indices)} in all)"
