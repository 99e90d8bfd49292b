"""Generated ratings: few users and items are frequent, most are rare."""

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from regimen.data.sources import TensorSamples
from regimen.data.splits import Split

RATINGS = 60_000


class Ratings(TensorSamples):
    """Ratings from 1 to 5, in steps of a half, of which a tenth is val and a tenth test.

    Samples are `(pair, rating)`, pair (2,): the numbers of a user and of an item. A rating is the
    product of 4 factors of the two and what is typical of each, with noise of deviation 0.4.

    mean: of the split's ratings; a network starts from that of train.
    """

    def __init__(self, split: Split, users: int, items: int, seed: int = 0) -> None:
        pairs, ratings = _generated(users, items, seed)
        tenth = len(ratings) // 10
        parts = {
            "train": slice(2 * tenth, None),
            "val": slice(tenth, 2 * tenth),
            "test": slice(tenth),
        }
        rows = parts[split]
        self.mean = float(ratings[rows].mean())
        super().__init__(torch.tensor(pairs[rows]), torch.tensor(ratings[rows]).float(), None)


@functools.cache
def _generated(users: int, items: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    draws = np.random.RandomState(seed)
    # A Zipf law: the item of rank r is drawn in proportion to 1 / (r + 10).
    user_shares = 1 / (np.arange(users) + 10.0)
    item_shares = 1 / (np.arange(items) + 10.0)
    user = draws.choice(users, RATINGS, p=user_shares / user_shares.sum())
    item = draws.choice(items, RATINGS, p=item_shares / item_shares.sum())
    user_factors = draws.normal(size=(users, 4))
    item_factors = draws.normal(size=(items, 4))
    ratings = 3.3 + 0.4 * draws.normal(size=users)[user] + 0.4 * draws.normal(size=items)[item]
    ratings += 0.35 * (user_factors[user] * item_factors[item]).sum(1)
    ratings += 0.4 * draws.normal(size=RATINGS)
    return np.stack([user, item], 1), np.clip(np.round(2 * ratings) / 2, 1, 5)
