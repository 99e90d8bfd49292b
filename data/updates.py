"""The samples of each update, and how they are split over ranks and micro-batches."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from data.batch import Piece
from data.errors import DataError

Indices = npt.NDArray[np.int64]


class Order(Protocol):
    """The order of an epoch's samples, as a pure function of its own seed and the epoch."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    def __call__(self, epoch: int) -> Any:
        """Return the sample indices of an epoch: an int64 array, or what computes its slices."""


class Updates(Protocol):
    """The samples of each update: of `loader.batch_sampler`, or an order split by size."""

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
                f"loader.batch_size={batch_size}; lower it or set loader.drop_last=false"
            )
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._epoch: int | None = None
        self._view: Any = None

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def samples(self, epoch: int, update: int) -> Indices:
        """Return the sample indices of one update; the epoch's order is computed once."""
        if self._epoch != epoch:
            self._epoch, self._view = epoch, self.order(epoch)
        first = update * self.batch_size
        part: Indices = self._view[first : min(first + self.batch_size, len(self.order))]
        return part


class UpdateSampler:
    """Yield each rank's micro-batches of any updates, without replaying earlier ones.

    The n samples of an update are split, as by `numpy.array_split`, into
    `gradient_accumulation_steps * world_size` pieces; piece (m, r) is number m * world_size + r.
    Micro-batches whose rank-0 piece is empty are left out, so all ranks have the same number.
    """

    def __init__(
        self,
        order: Order | Updates,
        *,
        batch_size: int | None,
        drop_last: bool = False,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if callable(order):
            if batch_size is None:
                raise DataError(
                    "loader.batch_size is needed unless loader.batch_sampler makes the batches"
                )
            order = OrderedUpdates(order, batch_size, drop_last)
        self.updates: Updates = order
        self.batch_size = batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return len(self.updates)

    def pieces(self, epoch: int, update: int) -> list[Piece]:
        """Return this rank's micro-batches of an update, in execution order."""
        indices = self.updates.samples(epoch, update).tolist()
        total = len(indices)
        parts = self.gradient_accumulation_steps * self.world_size
        size, extra = divmod(total, parts)
        micro_batches = -(-min(total, parts) // self.world_size)
        pieces = []
        for m in range(micro_batches):
            number = m * self.world_size + self.rank
            first = number * size + min(number, extra)
            own = tuple(indices[first : first + size + (number < extra)])
            some, start = (own, first) if own else ((indices[0],), 0)
            place = (start, total, m, micro_batches, epoch, update)
            pieces.append(Piece(some, len(own), *place))
        return pieces

    def walk(self, epoch: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield this rank's pieces of updates `start` to `stop` of an epoch."""
        for update in range(start, stop):
            yield from self.pieces(epoch, update)
