"""Seeds, random numbers and permutations as pure functions of what they are used for.

Everything that is drawn for the data comes from a 64-bit key, hashed from (seed, domain, numbers
that identify the draw). No generator has a position that a resume would have to find again, and a
draw is the same in every process and worker.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Words = NDArray[Any]  # uint64; the types of numpy allow no python integer beside one
Indices = NDArray[np.int64]

_MASK = (1 << 64) - 1

# The increment and the multipliers of splitmix64.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

_FEISTEL_ROUNDS = 8
_BLOCK = 4096  # positions computed at a time: numpy takes about as long for a single batch's

# Each kind of draw has its own domain, so that equal numbers in two domains are unrelated.
ORDER = 1
SAMPLE = 2
MICRO_BATCH = 3
REPLACEMENT = 5
SPLIT = 6
LOADER = 7
FIXED_SAMPLE = 8  # of a sample, the same in every epoch


def mix(value: int) -> int:
    """Return the first output of splitmix64 seeded by `value` (Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, *parts: int) -> int:
    """Hash a seed and the numbers that identify a draw to 64 bits."""
    value = mix(seed & _MASK)
    for part in parts:
        value = mix(value ^ (part & _MASK))
    return value


def finalise(words: Words) -> Words:
    """Apply the finaliser of splitmix64 to an array, without the increment that `mix` adds first.

    The unsigned arithmetic of numpy wraps around, as the algorithm requires.
    """
    words = (words ^ (words >> 30)) * _MULTIPLIER_1
    words = (words ^ (words >> 27)) * _MULTIPLIER_2
    result: Words = words ^ (words >> 31)
    return result


def splitmix64(seeds: Words, first: int, numbers: int) -> Words:
    """Return outputs `first`, `first + 1`, ... of a generator for each seed: (numbers, n).

    Output 0 is `mix(seed)`. splitmix64 is counter-based: output k is `finalise(seed + (k + 1) *
    gamma)`, so outputs need not be computed in order.
    """
    counters = np.arange(first + 1, first + numbers + 1, dtype=np.uint64)
    return finalise(seeds + (counters * _GAMMA)[:, None])


def keys(values: ArrayLike, *parts: int) -> Words:
    """Return `key(*parts, value)` for each of many values."""
    words = np.asarray(values, dtype=np.uint64) ^ key(*parts)
    return splitmix64(words, 0, 1).reshape(words.shape)


def occurrence_key(sample_key: int, occurrence: int) -> int:
    """Return the key of an occurrence of a sample; the first one (0) has the sample's own key."""
    return mix(sample_key ^ occurrence) if occurrence else sample_key


def occurrence_keys(sample_keys: Words, occurrences: ArrayLike) -> Words:
    """Return the key of an occurrence (n,) of each of many samples, from their keys (n,)."""
    numbers = np.asarray(occurrences, dtype=np.uint64)
    later_keys = splitmix64(sample_keys ^ numbers, 0, 1).reshape(sample_keys.shape)
    return np.where(numbers == 0, sample_keys, later_keys)


@dataclass(eq=False, repr=False)
class Draws:
    """Draw for n samples: the k-th number of a sample is a function of its key and k alone.

    The generator is splitmix64 (Steele et al. 2014). The numbers of a batch are computed as one
    array, but those of a sample do not depend on the batch that it is in.

    keys: (n,), one for each sample.
    epoch: the epoch of the batch, for transforms whose keys do not depend on it.
    drawn: how many numbers of each sample have been used.
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
        upper_24_bits = self._next(each or 1) >> 40
        unit = upper_24_bits.astype(np.float32) * np.float32(2**-24)
        numbers = torch.from_numpy(unit * np.float32(high - low) + np.float32(low))
        return numbers[0] if each is None else numbers.T

    def integers(self, bounds: int | Tensor) -> Tensor:
        """Return int64 numbers (n,) in [0, bound); a tensor (n,) gives each sample its own bound.

        The relative error of a value's probability is below bound / 2**53.
        """
        upper_53_bits = self._next(1)[0] >> 11
        unit = upper_53_bits.astype(np.float64) * 2**-53
        scaled = unit * (bounds.numpy() if isinstance(bounds, Tensor) else bounds)
        return torch.from_numpy(scaled.astype(np.int64))

    def order(self, numbers: int) -> Tensor:
        """Return a random order of 0, 1, ... numbers - 1 for each sample (n, numbers)."""
        return torch.from_numpy(self._next(numbers).argsort(0, kind="stable").T)

    def _next(self, numbers: int) -> Words:
        """Return the next numbers of each sample (numbers, n)."""
        first = self.drawn
        self.drawn += numbers
        return splitmix64(self.keys, first, numbers)


class Permutation:
    """A keyed bijection of [0, n), evaluated at the positions that are asked for.

    A generalised Feistel network permutes a x b >= n numbers, a and b the integers next to the root
    of n. A result outside of [0, n), less than one in sqrt(n), is mapped again until it is inside
    ("cycle walking"). Both are from Black and Rogaway, Ciphers with arbitrary finite domains, 2002.
    """

    def __init__(self, samples: int, *identity: int) -> None:
        self.samples = samples
        self._rows = math.isqrt(max(samples - 1, 0)) + 1
        self._columns = -(-samples // self._rows)
        self._round_keys = [key(*identity, number) for number in range(_FEISTEL_ROUNDS)]
        # The block that was computed last, and its first position.
        self._block = np.empty(0, np.int64)
        self._block_start = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice, /) -> Indices:
        """Return the samples at positions `part`; those that follow are computed with them."""
        start, stop, step = part.indices(self.samples)
        if step != 1 or stop - start > _BLOCK:
            return self._at(np.arange(start, stop, step, dtype=np.uint64))

        block_stop = self._block_start + len(self._block)
        if not self._block_start <= start <= stop <= block_stop:
            block_stop = min(start + _BLOCK, self.samples)
            self._block = self._at(np.arange(start, block_stop, dtype=np.uint64))
            self._block_start = start
        return self._block[start - self._block_start : stop - self._block_start]

    def _at(self, positions: Words) -> Indices:
        result = self._feistel(positions)
        outside = np.flatnonzero(result >= self.samples)
        while len(outside):
            result[outside] = self._feistel(result[outside])
            still_outside = result[outside] >= self.samples
            outside = outside[still_outside]
        return result.astype(np.int64)

    def _feistel(self, numbers: Words) -> Words:
        left = numbers // self._columns
        right = numbers - left * self._columns
        for round_number, round_key in enumerate(self._round_keys):
            # The halves change places, so `left` is below `rows` and below `columns` in turn.
            modulus = self._columns if round_number % 2 else self._rows
            # The upper half of the hash, scaled to [0, modulus); its bias is below modulus / 2**32.
            upper_half = finalise(right ^ round_key) >> 32
            total = left + (upper_half * modulus >> 32)
            left = right
            # `total % modulus`: total is below 2 * modulus, and a negative difference wraps around
            # to a huge number.
            right = np.minimum(total, total - modulus)
        result: Words = left * self._columns + right
        return result


def random_state(seed: int, *parts: int) -> np.random.RandomState:
    """Return a legacy numpy generator for a key: numpy guarantees its stream for all versions."""
    return np.random.RandomState(np.random.MT19937(key(seed, *parts)))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore torch's CPU, python's and numpy's global generators at the end."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_rng(key: int) -> None:
    """Seed torch's CPU, python's and numpy's global generators.

    `torch.manual_seed` visits every device (88 us); the CPU's own generator takes 1 us, and data
    code draws on no other.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
