"""Seeds as pure functions of what is drawn: the root of I1 and I2."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Each kind of draw has its own domain, so that equal numbers in two of them are unrelated draws.
ORDER = 1
SAMPLE = 2
MICRO_BATCH = 3
REPLACEMENT = 5
SPLIT = 6
LOADER = 7


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _C1) & _MASK
    value = ((value ^ (value >> 27)) * _C2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, *parts: int) -> int:
    """Hash a seed and whatever identifies a draw to 64 bits."""
    value = mix(seed & _MASK)
    for part in parts:
        value = mix(value ^ (part & _MASK))
    return value


def scrambled(words: Words) -> Words:
    """Scramble an array of 64-bit words; unsigned arithmetic of numpy wraps around, as it should.

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


def keys(values: npt.ArrayLike, *parts: int) -> Words:
    """Return `key(*parts, value)` for each of many values."""
    words: Words = np.asarray(values, dtype=np.uint64) ^ np.uint64(key(*parts))
    return counted(words, 0, 1).reshape(words.shape)


def random_state(seed: int, *parts: int) -> np.random.RandomState:
    """Return a numpy generator for a key; numpy promises that this one's stream never changes."""
    return np.random.RandomState(np.random.MT19937(key(seed, *parts)))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Give torch's CPU, python's and numpy's global generators back as they were."""
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
    """Seed the three global generators.

    `torch.manual_seed` visits every device (88 us); the CPU's own generator takes 1 us, and data
    code draws on no other.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
