"""Tables of numbers: features, and a value to predict."""

import torch
from torch import Tensor

from data.errors import DataError
from data.images import Transform
from data.keys import SPLIT, random_state
from data.sources import Split
from data.splits import fold_of

_PART = 66  # samples of val and of test


class Diabetes:
    """scikit-learn's 442 diabetes patients: 10 measurements, and the disease a year later.

    In the package: no download. Features and value are standardised with the training set's mean
    and deviation. The split is fixed by `split_seed`: 310 train, 66 val, 66 test. With `folds` val
    is fold number `fold` of the 376 that are not test.
    """

    def __init__(
        self,
        split: Split,
        split_seed: int = 0,
        transform: Transform | None = None,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        from sklearn.datasets import load_diabetes

        features, values = load_diabetes(return_X_y=True)
        table = torch.from_numpy(features).float(), torch.from_numpy(values).float()
        order = torch.from_numpy(random_state(split_seed, SPLIT, 2).permutation(len(values)))
        val, test, train = order[:_PART], order[_PART : 2 * _PART], order[2 * _PART :]
        if fold is not None and folds is not None:
            pool = torch.cat([val, train]).sort().values
            rest, part = fold_of(len(pool), fold, folds, split_seed)
            train, val = pool[rest], pool[part]
        parts = {"val": val, "test": test, "train": train}
        if split not in parts:
            raise DataError(f"split is {split!r}, not one of train, val, test")
        rows = parts[split].sort().values
        self.features, self.values = (_standardised(c, parts["train"])[rows] for c in table)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all samples as one batch, before the transforms."""
        return self.features, self.values

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = self.features[index]
        return features if self.transform is None else self.transform(features), self.values[index]


def _standardised(column: Tensor, train: Tensor) -> Tensor:
    known = column[train]
    return (column - known.mean(0)) / known.std(0)
