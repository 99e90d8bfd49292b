"""Random numbers for many samples at once, each sample's a function of its own key alone (I2)."""

import numpy as np
import torch
from torch import Tensor

from data.keys import Words, counted, keys

# Of the random numbers that a run's batched transforms are made of. It is kept in checkpoints: a
# run does not go on with other draws than it began with.
VERSION = 2

_AHEAD = 4  # numbers of each sample that are computed together: as fast as one


class Draws:
    """Draw for n samples: the k-th number of a sample follows from its key and k alone.

    The generator is splitmix64 (Steele et al. 2014), which computes any of its numbers by itself:
    those of a batch are one array, and the same whatever batch a sample is in.
    """

    def __init__(self, keys: Words) -> None:
        self._keys = keys
        self._ready = counted(keys, 0, 0)  # (numbers, n), of which the first were not given out yet
        self._drawn = 0

    @classmethod
    def seeded(cls, samples: int, seed: int) -> "Draws":
        """Return the draws of samples 0, 1, ... for a seed: for tests and trials."""
        return cls(keys(np.arange(samples), seed))

    def __len__(self) -> int:
        return len(self._keys)

    def uniform(self, low: float = 0.0, high: float = 1.0, each: int | None = None) -> Tensor:
        """Return float32 numbers (n,), or (n, each), from low up to below high.

        They are multiples of 2**-24 of the range, as those of `torch.rand` are.
        """
        unit = (self._words(each or 1) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        numbers = torch.from_numpy(unit) * (high - low) + low
        return numbers[0] if each is None else numbers.T

    def integers(self, bounds: int | Tensor) -> Tensor:
        """Return an int64 number (n,) from 0 to below a bound, or to below each sample's own.

        A value's probability is off by less than bound / 2**53 of itself.
        """
        unit = (self._words(1)[0] >> np.uint64(11)).astype(np.float64) * 2**-53
        return (torch.from_numpy(unit) * bounds).long()

    def order(self, numbers: int) -> Tensor:
        """Return a random order of 0, 1, ... numbers - 1 for each sample (n, numbers)."""
        return torch.from_numpy(self._words(numbers).argsort(0, kind="stable").T)

    def _words(self, numbers: int) -> Words:
        """Return the next numbers of each sample (numbers, n)."""
        missing = numbers - len(self._ready)
        if missing > 0:
            more = counted(self._keys, self._drawn, max(missing, _AHEAD))
            self._drawn += len(more)
            self._ready = np.concatenate([self._ready, more])
        given, self._ready = self._ready[:numbers], self._ready[numbers:]
        return given
