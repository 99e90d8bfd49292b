"""Measurements of patients, for regression."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.keys import Indices
from regimen.data.sources import TensorSamples
from regimen.data.splits import Split, unlabelled_parts
from regimen.data.transforms import Transform


class Diabetes(TensorSamples):
    """scikit-learn's 442 diabetes patients: 10 measurements, and the disease a year later.

    In the package: no download. Features and value are standardised with the training set's mean
    and deviation. The split is fixed by `split_seed`: 310 train, 66 val, 66 test. With `folds` val
    is fold number `fold` of the 376 that are not test.
    """

    def __init__(
        self,
        split: Split,
        split_seed: int = 0,
        transform: Transform = None,
        fold: int = 0,
        folds: int = 0,
    ) -> None:
        from sklearn.datasets import load_diabetes

        features, values = load_diabetes(return_X_y=True)
        parts = unlabelled_parts(len(values), 66, 2, split_seed, fold, folds)
        rows = np.sort(parts[split])
        inputs = _standardised(features, parts["train"])
        targets = _standardised(values, parts["train"])
        super().__init__(inputs[rows], targets[rows], transform)


def _standardised(array: NDArray[np.float64], train_rows: Indices) -> Tensor:
    values = torch.from_numpy(array).float()
    train = values[train_rows]
    return (values - train.mean(0)) / train.std(0)
