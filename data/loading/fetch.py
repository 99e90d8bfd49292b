"""Fetch one micro-batch, in the main process or in a worker: keyed, collated, errors as values."""

import errno
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import default_collate

from data.batch import Piece, rebuild
from data.errors import DataError, UnreadableError, WorkerError, is_fault, reason
from data.keys import REPLACEMENT, SAMPLE, key, preserved_rng, seed_rng
from data.updates import Indices

Collate = Callable[[Sequence[Any]], Any]
REPLACEMENTS = 16  # attempts to replace a broken sample


class Ragged(NamedTuple):
    """Images of different sizes, which a batched step will crop or resize to one size."""

    images: list[Tensor]

    def sizes(self, most: int = 3) -> str:
        """List some of the sizes."""
        sizes = sorted({tuple(image.shape[-2:]) for image in self.images})
        listed = [f"{height} x {width}" for height, width in sizes[:most]]
        return ", ".join([*listed, "..."] if len(sizes) > most else listed)


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new first dimension.

    Like torch's `default_collate`, except that tuples stay tuples, and a field that is None in
    every sample stays None.
    """
    first = samples[0]
    if first is None and all(sample is None for sample in samples):
        return None
    if isinstance(first, Mapping):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, list | tuple):
        return rebuild(first, [collate(column) for column in zip(*samples, strict=True)])
    return default_collate(list(samples))


def collate_ragged(samples: Sequence[Any]) -> Any:
    """Collate, but leave inputs (the samples' first part) of different sizes as they are."""
    first = samples[0]
    inputs = [sample[0] for sample in samples] if isinstance(first, tuple) else list(samples)
    if len({image.shape for image in inputs if isinstance(image, Tensor)}) < 2:
        return collate(samples)
    if not isinstance(first, tuple):
        return Ragged(inputs)
    return rebuild(first, [Ragged(inputs), *collate([sample[1:] for sample in samples])])


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be loaded and was left out."""

    index: int
    path: str | None
    reason: str


@dataclass(slots=True)
class Fetched:
    """A batch, or the error that the main process raises: both may come from a worker."""

    batch: Any
    piece: Piece
    skipped: Sequence[Skipped] = ()
    failure: Exception | None = None


class BrokenOff(Exception):  # noqa: N818 (nothing went wrong)
    """The piece is no longer needed. Raised between two samples, outside users' code."""


def never() -> bool:
    """Return False: nothing interrupts the loading."""
    return False


@dataclass(eq=False)
class Fetcher:
    """Load the samples of a piece and put them together.

    on_error: "raise", "replace" (by a sample that the broken one's index and the seed determine:
    the update stays whole) or "drop" (the piece shrinks: evaluation counts nothing twice).
    `replacements`: the samples that may stand in for others; None: all of the data set.
    """

    dataset: Any
    collate: Collate
    seed: int
    on_error: str
    replacements: Indices | None = None
    interrupted: Callable[[], bool] = never  # asked before each sample
    # The index that is being loaded, at `slot`: workers share it with the main process.
    watch: Any = field(default_factory=lambda: [-1])
    slot: int = 0

    def __call__(self, piece: Piece) -> Fetched:
        """Return a piece's batch, or an error as a value. Raises BrokenOff if interrupted."""
        try:
            return self._fetch(piece)
        except BaseException as error:
            if isinstance(error, BrokenOff) or not is_fault(error):
                raise
            return Fetched(None, piece, failure=memory_error(error) or _failure(error, piece))

    def name(self, index: int) -> str:
        """Name a sample by its index and, where there is one, its file."""
        path = path_of(self.dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"

    def _fetch(self, piece: Piece) -> Fetched:
        if callable(begin := getattr(self.dataset, "begin_epoch", None)):
            begin(piece.epoch, key(self.seed, SAMPLE, piece.epoch))
        elif callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(piece.epoch)
        if offers(type(self.dataset), "batch", "__getitem__"):
            batch = self.dataset.batch(piece.indices)
            if batch is not None:
                return Fetched(batch, piece)
        skipped: list[Skipped] = []
        with preserved_rng():
            if self.on_error == "drop":
                samples, piece = self._kept(piece, skipped)
            else:
                samples = [self._replaced(index, piece.epoch, skipped) for index in piece.indices]
            return Fetched(self.collate(samples), piece, skipped)

    def _replaced(self, index: int, epoch: int, skipped: list[Skipped]) -> Any:
        """Load one sample or its replacement, which is drawn for with the sample's own key."""
        others, candidate = self.replacements, index
        for attempt in range(REPLACEMENTS):
            try:
                return self._load(candidate, epoch, index)
            except DataError as error:
                if self.on_error == "raise":
                    raise
                skipped.append(Skipped(candidate, path_of(self.dataset, candidate), str(error)))
            drawn = key(self.seed, REPLACEMENT, index, attempt)
            candidate = drawn % len(self.dataset if others is None else others)
            candidate = candidate if others is None else int(others[candidate])
        raise DataError(f"sample {index} and {REPLACEMENTS - 1} replacements could not be loaded")

    def _kept(self, piece: Piece, skipped: list[Skipped]) -> tuple[list[Any], Piece]:
        """Load the samples that can be loaded; an empty piece gets a sample and `count` 0."""
        samples, kept = [], []
        for index in piece.indices:
            try:
                samples.append(self._load(index, piece.epoch, index))
            except DataError as error:
                skipped.append(Skipped(index, path_of(self.dataset, index), str(error)))
            else:
                kept.append(index)
        if not kept:  # of files without labels all may be broken
            own, first = getattr(self.dataset, "stand_in", None), piece.indices[0]
            stand_in = own() if callable(own) else self._replaced(first, piece.epoch, skipped)
            return [stand_in], replace(piece, indices=piece.indices[:1], count=0)
        if len(kept) < len(piece.indices):
            piece = replace(piece, indices=tuple(kept), count=len(kept) if piece.count else 0)
        return samples, piece

    def _load(self, index: int, epoch: int, keyed_by: int) -> Any:
        if self.interrupted():
            raise BrokenOff
        self.watch[self.slot] = index
        seed_rng(key(self.seed, SAMPLE, epoch, keyed_by))
        try:
            return self.dataset[index]
        except BaseException as error:
            if memory_error(error) or not is_fault(error):
                raise
            text = str(error) if isinstance(error, DataError) else reason(error)
            if isinstance(error, UnreadableError) and self.on_error == "raise":
                text = f"{text}; data.on_error=skip leaves such samples out"
            path = path_of(self.dataset, index)
            named = path is not None and path in text
            where = f"sample {index}" if named else self.name(index)
            raise DataError(f"{where}: {text}") from error


def _failure(error: BaseException, piece: Piece) -> DataError:
    """Return a DataError for an exception, with the traceback as a note."""
    text = str(error)
    if not isinstance(error, DataError):
        shown = ", ".join(str(index) for index in piece.indices[:6])
        many = f", ... ({len(piece.indices)} in all)" if len(piece.indices) > 6 else ""
        text = (
            f"samples {shown}{many} cannot be put into a batch (do their shapes and types agree? "
            f"see transforms, loader.collate_fn): {reason(error)}"
        )
    failure = DataError(text)
    failure.add_note(traceback.format_exc())
    return failure


def offers(kind: type, method: str, *other_ways: str) -> bool:
    """Return whether a class has a method, and no subclass of its owner another way to a sample."""
    for base in kind.__mro__:
        if method in vars(base):
            return True
        if any(other in vars(base) for other in other_ways):
            return False
    return False


def path_of(dataset: Any, index: int) -> str | None:
    """Return the file of a sample, if its data set can tell."""
    path = getattr(dataset, "path", None)
    return path(index) if callable(path) else None


def memory_error(error: BaseException) -> WorkerError | None:
    """Say in words how an exception shows that memory gave out; None if it does not."""
    full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if full or isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return WorkerError(f"out of memory: {reason(error)}")
    return None
