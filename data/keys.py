"""Seeds, random numbers and permutations as pure functions of what they are used for."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_ROUNDS = 8
_BLOCK = 4096  # positions computed at a time: numpy takes about as long for a batch's
_HALF = np.uint64(32)

# Each kind of draw has its own domain, so that equal numbers in two domains are unrelated.
ORDER = 1
SAMPLE = 2
MICRO_BATCH = 3
REPLACEMENT = 5
SPLIT = 6
LOADER = 7
LASTING = 8


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _C1) & _MASK
    value = ((value ^ (value >> 27)) * _C2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, *parts: int) -> int:
    """Hash a seed and the numbers that identify a draw to 64 bits."""
    value = mix(seed & _MASK)
    for part in parts:
        value = mix(value ^ (part & _MASK))
    return value


def scrambled(words: Words) -> Words:
    """Scramble an array of 64-bit words; numpy's unsigned arithmetic wraps around as required.

    `mix` of many values is `scrambled(values + gamma)`.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_C1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_C2)
    return words ^ (words >> np.uint64(31))


def counted(words: Words, first: int, numbers: int) -> Words:
    """Return outputs `first`, `first + 1`, ... of splitmix64, seeded by each word (numbers, n).

    Output 0 is `mix(word)`.
    """
    steps = np.arange(first + 1, first + numbers + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return scrambled(words + steps[:, None])


def keys(values: ArrayLike, *parts: int) -> Words:
    """Return `key(*parts, value)` for each of many values."""
    words = np.asarray(values, dtype=np.uint64) ^ np.uint64(key(*parts))
    return counted(words, 0, 1).reshape(words.shape)


def of_occurrence(sample_key: int, occurrence: int) -> int:
    """Return the key of an occurrence of a sample: its own for the first, number 0."""
    return mix(sample_key ^ occurrence) if occurrence else sample_key


def of_occurrences(sample_keys: Words, occurrences: ArrayLike) -> Words:
    """Return `of_occurrence` of each of many keys (n,) and its occurrence (n,)."""
    numbers = np.asarray(occurrences, dtype=np.uint64)
    later = counted(sample_keys ^ numbers, 0, 1).reshape(sample_keys.shape)
    return np.where(numbers == 0, sample_keys, later)


@dataclass(eq=False, repr=False)
class Draws:
    """Draw for n samples: the k-th number of a sample is a function of its key and k alone.

    The generator is splitmix64 (Steele et al. 2014), a counter-based one: the numbers of a batch
    are computed as one array, and a sample's do not depend on its batch. `epoch` is that of the
    batch, for draws that do not depend on it otherwise; `drawn`: numbers that are passed over.
    """

    keys: Words
    epoch: int = 0
    drawn: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def uniform(self, low: float = 0.0, high: float = 1.0, each: int | None = None) -> Tensor:
        """Return float32 numbers (n,), or (n, each), in [low, high).

        They are multiples of 2**-24 of the range, as those of `torch.rand`.
        """
        unit = (self._words(each or 1) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        numbers = torch.from_numpy(unit * np.float32(high - low) + np.float32(low))
        return numbers[0] if each is None else numbers.T

    def integers(self, bounds: int | Tensor) -> Tensor:
        """Return int64 numbers (n,) in [0, bound); a tensor gives each sample its own bound.

        The relative error of a value's probability is below bound / 2**53.
        """
        unit = (self._words(1)[0] >> np.uint64(11)).astype(np.float64) * 2**-53
        most = bounds if isinstance(bounds, int) else bounds.numpy()
        return torch.from_numpy((unit * most).astype(np.int64))

    def order(self, numbers: int) -> Tensor:
        """Return a random order of 0, 1, ... numbers - 1 for each sample (n, numbers)."""
        return torch.from_numpy(self._words(numbers).argsort(0, kind="stable").T)

    def _words(self, numbers: int) -> Words:
        """Return the next numbers of each sample (numbers, n)."""
        self.drawn += numbers
        return counted(self.keys, self.drawn - numbers, numbers)


class Permutation:
    """A keyed bijection of [0, n), evaluated at given positions.

    A Feistel network maps a x b numbers to themselves, a and b the next to the root of n; what
    falls outside of [0, n), less than one number in sqrt(n), is mapped again.
    """

    def __init__(self, samples: int, *identity: int) -> None:
        self.samples = samples
        rows = math.isqrt(max(samples - 1, 0)) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-samples // rows))
        self._keys = [np.uint64(key(*identity, number)) for number in range(_ROUNDS)]
        self._begin, self._block = 0, np.empty(0, np.int64)  # what was computed last, and where

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice, /) -> Indices:
        """Return the samples at positions `part`; those that follow are computed with them."""
        start, stop, step = part.indices(self.samples)
        if step != 1 or stop - start > _BLOCK:
            return self._at(start, stop, step)
        if not self._begin <= start <= stop <= self._begin + len(self._block):
            self._begin, self._block = start, self._at(start, min(start + _BLOCK, self.samples))
        return self._block[start - self._begin : stop - self._begin]

    def _at(self, *positions: int) -> Indices:
        found = self._mapped(np.arange(*positions, dtype=np.uint64))
        outside = np.flatnonzero(found >= self.samples)
        while len(outside):
            found[outside] = self._mapped(found[outside])
            outside = outside[found[outside] >= self.samples]
        return found.astype(np.int64)

    def _mapped(self, words: Words) -> Words:
        left = words // self._columns
        right, most = words - left * self._columns, (self._rows, self._columns)
        for turn, round_key in enumerate(self._keys):
            # The high half of a hash, scaled to the side; its bias is below side / 2**32.
            side = most[turn % 2]
            left = left + ((scrambled(right ^ round_key) >> _HALF) * side >> _HALF)
            left, right = right, np.minimum(left, left - side)  # modulo: a negative wraps around
        return left * self._columns + right


def random_state(seed: int, *parts: int) -> np.random.RandomState:
    """Return a legacy numpy generator for a key: numpy guarantees its stream for all versions."""
    return np.random.RandomState(np.random.MT19937(key(seed, *parts)))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore torch's CPU, python's and numpy's global generators at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def seed_rng(key: int) -> None:
    """Seed the three global generators.

    `torch.manual_seed` visits every device (88 us); the CPU's own generator takes 1 us, and data
    code draws on no other.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
