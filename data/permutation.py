"""A random order of n samples that is computed position by position: no memory, however large n.

A Feistel network permutes the numbers of 2k bits; positions that fall outside [0, n) are sent
through again until they fall inside (cycle walking, Black and Rogaway 2002), fewer than 4 times on
average. Slices are computed as numpy vectors.
"""

import numpy as np
import numpy.typing as npt

from data.keys import ORDER, key
from data.sampler import Indices

_ROUNDS = 8
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
Words = npt.NDArray[np.uint64]


class Permutation:
    """A keyed bijection of [0, n), evaluated where it is asked for."""

    def __init__(self, samples: int, *identity: int) -> None:
        self.samples = samples
        half = max(1, -(-max(samples - 1, 1).bit_length() // 2))
        self._shift = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = [np.uint64(key(*identity, number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice, /) -> Indices:
        """Return the samples at positions `part`."""
        return self(np.arange(*part.indices(self.samples), dtype=np.uint64))

    def __call__(self, positions: Words) -> Indices:
        """Return the samples at any positions."""
        found = self._network(positions)
        outside = np.flatnonzero(found >= self.samples)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.samples]
        return found.astype(np.int64)

    def _network(self, words: Words) -> Words:
        left, right = words >> self._shift, words & self._mask
        for round_key in self._keys:
            left, right = right, left ^ (_scrambled(right ^ round_key) & self._mask)
        return (left << self._shift) | right


def _scrambled(words: Words) -> Words:
    """Mix 64 bits (splitmix64); unsigned numpy arithmetic wraps around, as it should."""
    words = (words ^ (words >> np.uint64(30))) * _C1
    words = (words ^ (words >> np.uint64(27))) * _C2
    return words ^ (words >> np.uint64(31))


class Permuted:
    """All samples in a new random order each epoch, without holding the order in memory."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Permutation:
        """Return the epoch's permutation, to be sliced."""
        return Permutation(self.samples, self.seed, ORDER, epoch)
