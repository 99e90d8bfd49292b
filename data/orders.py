"""Orders of an epoch's samples: pure functions of (seed, epoch)."""

import numpy as np

from data.keys import ORDER, random_state
from data.sampler import Indices, Order


class Sequential:
    """All samples, first to last, in every epoch: the order of evaluation."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return 0, 1, 2, ..."""
        return np.arange(self.samples, dtype=np.int64)


class Shuffled:
    """All samples in a new random order each epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __call__(self, epoch: int) -> Indices:
        """Return a permutation: 8 bytes a sample for the epoch that is under way."""
        shuffled = random_state(self.seed, ORDER, epoch).permutation(self.samples)
        return shuffled.astype(np.int64, copy=False)


class FirstOf:
    """The first `samples` of an order's epoch 0, the same in every epoch: to overfit on purpose."""

    def __init__(self, order: Order, samples: int) -> None:
        self.indices = np.array(order(0)[: min(samples, len(order))])

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, epoch: int) -> Indices:
        """Return the same samples, whatever the epoch."""
        return self.indices
