"""Randomness keyed by what is drawn, leaving the training's random state untouched (I2)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


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
