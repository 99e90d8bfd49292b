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

    source: an iterable; where it has them, `set_epoch(epoch)` is called before an epoch,
    `iter_from(position)` jumps ahead (else samples are read and dropped), and `load(item)` turns
    what was yielded into a sample: only of those that are needed here.
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
            way_out = (
                "{_target_: regimen.data.streams.Stream, source: ..., length: samples of an epoch}"
            )
            what = f"{type(self.source).__name__} has no length, which the schedule needs"
            raise DataError(f"{what}: wrap it in {way_out}")
        self._iterator: Iterator[Any] | None = None
        self._position, self._epoch, self._key = 0, 0, 0

    def __len__(self) -> int:
        return len(self.source) if self.length is None else self.length

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be pickled: each worker starts its own.
        return {**self.__dict__, "_iterator": None}

    def begin_epoch(self, epoch: int, epoch_key: int) -> None:
        """Set the epoch, and the key of all its random draws."""
        if (epoch, epoch_key) != (self._epoch, self._key):
            self._epoch, self._key, self._iterator = epoch, epoch_key, None

    def __getitem__(self, position: int) -> Any:
        item = self._read(position)
        seed_rng(key(self._key, position, 1))
        load = getattr(self.source, "load", None)
        return on_inputs(self.transform, item if load is None else load(item))

    def _read(self, position: int) -> Any:
        if self._iterator is None or position < self._position:
            self._start(position)
        assert self._iterator is not None
        while True:
            # Draws are keyed by position, so that a reader may start anywhere.
            seed_rng(key(self._key, self._position))
            try:
                item = next(self._iterator)
            except StopIteration:
                self._iterator = None
                early = f"the stream ended after {self._position} of {len(self)} samples"
                way_out = f"set its length to {self._position} or less"
                raise DataError(f"{early}: {way_out}") from None
            self._position += 1
            if self._position > position:
                return item

    def _start(self, position: int) -> None:
        if callable(tell := getattr(self.source, "set_epoch", None)):
            tell(self._epoch)
        jump = getattr(self.source, "iter_from", None)
        seed_rng(self._key)
        self._iterator = iter(self.source) if jump is None else jump(position)
        self._position = 0 if jump is None else position


def as_dataset(dataset: Any) -> Any:
    """Return a data set whose samples have numbers: an iterable-style one becomes a `Stream`."""
    return Stream(dataset) if isinstance(dataset, IterableDataset) else dataset
