"""Data that can only be read in order: samples are numbered by their position."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from regimen.data.errors import DataError
from regimen.data.keys import key, seed_rng
from regimen.data.transforms import Transform, on_inputs


@dataclass(eq=False)
class Stream:
    """Read a source in order, once an epoch; sample number i is the i-th that it yields.

    source: an iterable. It may have methods: `set_epoch(epoch)` is called before an epoch;
    `iter_from(position)` jumps ahead (without it samples are read and dropped); `load(item)` turns
    a yielded item into a sample, and is called for the samples of this worker and rank only.
    length: samples of an epoch; null = len(source). What comes after them is not read.

    Every worker and every rank reads the whole stream and keeps its own pieces, so that the
    batches do not depend on their number. A source therefore must not divide itself among workers
    or ranks (inside it, `get_worker_info()` is None).
    """

    source: Any
    length: int | None = None
    transform: Transform = None

    def __post_init__(self) -> None:
        if self.length is None and not hasattr(self.source, "__len__"):
            raise DataError(
                f"{type(self.source).__name__} has no length, which the schedule needs: wrap it in "
                "{_target_: regimen.data.streams.Stream, source: ..., length: samples of an epoch}"
            )
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._epoch = 0
        self._key = 0

    def __len__(self) -> int:
        return len(self.source) if self.length is None else self.length

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be pickled: each worker starts its own.
        return {**self.__dict__, "_iterator": None}

    def begin_epoch(self, epoch: int, epoch_key: int) -> None:
        """Set the epoch, and the key of all its random draws."""
        if epoch == self._epoch and epoch_key == self._key:
            return
        self._epoch = epoch
        self._key = epoch_key
        self._iterator = None

    def __getitem__(self, position: int) -> Any:
        sample = self._read(position)
        seed_rng(key(self._key, position, 1))
        load = getattr(self.source, "load", None)
        if load is not None:
            sample = load(sample)
        return on_inputs(self.transform, sample)

    def _read(self, position: int) -> Any:
        if self._iterator is None or position < self._position:
            self._iterator = self._start(position)
        while True:
            # Reading is keyed by position, not by what was read before: a reader that starts in the
            # middle, after a resume or in another worker, draws the same.
            seed_rng(key(self._key, self._position))
            try:
                item = next(self._iterator)
            except StopIteration:
                self._iterator = None
                raise DataError(
                    f"the stream ended after {self._position} of {len(self)} samples: "
                    f"set its length to {self._position} or less"
                ) from None
            self._position += 1
            if self._position > position:
                return item

    def _start(self, position: int) -> Iterator[Any]:
        """Return an iterator at `position` if the source can jump, else at the beginning."""
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        seed_rng(self._key)
        iter_from = getattr(self.source, "iter_from", None)
        if iter_from is None:
            self._position = 0
            return iter(self.source)
        iterator: Iterator[Any] = iter_from(position)
        self._position = position
        return iterator


def as_dataset(dataset: Any) -> Any:
    """Return a data set whose samples have numbers: an iterable-style one becomes a `Stream`."""
    return Stream(dataset) if isinstance(dataset, IterableDataset) else dataset
