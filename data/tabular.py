"""Measurements of patients, for regression."""

import numpy as np
import torch
from torch import Tensor

from data.splits import Split, unlabelled_parts
from data.transforms import Transform


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

        features, values = (torch.from_numpy(c).float() for c in load_diabetes(return_X_y=True))
        parts = unlabelled_parts(len(values), 66, 2, split_seed, fold, folds)
        rows, train = np.sort(parts[split]), parts["train"]
        self.features = ((features - features[train].mean(0)) / features[train].std(0))[rows]
        self.values = ((values - values[train].mean(0)) / values[train].std(0))[rows]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all samples as one batch, before the transforms."""
        return self.features, self.values

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = self.features[index]
        return features if self.transform is None else self.transform(features), self.values[index]
