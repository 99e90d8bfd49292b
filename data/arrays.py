"""Arrays, tensors and data frames in memory as a data set."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regimen.data.batch import index_batch, map_tensors, to_device
from regimen.data.errors import DataError, reason

CPU = torch.device("cpu")


@dataclass(eq=False, repr=False)
class ArraySamples:
    """Samples in memory, a row of each tensor: inputs, or inputs and targets.

    samples: X or (X, y); X may be a dict of tensors.
    dtype: the type that floating numbers are converted to, a batch at a time.
    in_batches: take whole batches at once; else each sample by itself.
    """

    samples: Any
    dtype: torch.dtype
    in_batches: bool = True

    def __post_init__(self) -> None:
        inputs = self.samples if self.targets is None else self.samples[0]
        self._length = _rows(inputs, "X")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[0], self._rows([index]))

    @property
    def targets(self) -> Tensor | None:
        """The target of each sample; samplers of classes count them."""
        return self.samples[1] if isinstance(self.samples, tuple) else None

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a whole batch at once, or None if samples are taken one by one."""
        return self._rows(indices) if self.in_batches else None

    def _rows(self, indices: Sequence[int]) -> Any:
        return to_device(index_batch(self.samples, indices, CPU), CPU, self.dtype)


def holds_arrays(values: Any) -> bool:
    """Return whether these are tensors, arrays, a data frame or a dict of such: no data set."""
    if isinstance(values, Tensor | np.ndarray | Mapping):
        return True
    return hasattr(values, "to_numpy") or hasattr(values, "__array__")


def as_samples(inputs: Any, targets: Any = None) -> Any:
    """Return inputs, or inputs and targets, as tensors with a row for each sample.

    A data frame's columns become floating numbers, since they are measurements. Targets that are
    integers become int64, which the losses for classes take. All else keeps its type. Raises
    DataError.
    """
    if isinstance(inputs, Mapping):
        samples: Any = {
            name: _as_tensor(part, f"X[{name!r}]", as_features=True)
            for name, part in inputs.items()
        }
    else:
        samples = _as_tensor(inputs, "X", as_features=True)
    rows = _rows(samples, "X")
    if targets is None:
        return samples
    labels = _as_tensor(targets, "y", as_features=False)
    if len(labels) != rows:
        raise DataError(f"X has {rows} rows and y has {len(labels)}: each sample has one of both")
    if not labels.is_floating_point() and not labels.is_complex():
        labels = labels.long()
    return samples, labels


def _rows(samples: Any, name: str) -> int:
    """Return the number of rows of a tensor, or of each of several. Raises DataError."""
    parts = samples if isinstance(samples, Mapping) else {name: samples}
    counts = {part: len(tensor) for part, tensor in parts.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"the arrays of {name} have different numbers of rows: {counts}")
    return next(iter(counts.values()))


def _as_tensor(values: Any, name: str, as_features: bool) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()  # waits for the tensor's device: once, before the training
    else:
        tensor = _from_array(_as_array(values, name, as_features), name)
    if not tensor.ndim:
        raise DataError(f"{name} is a single number: give an array with a row for each sample")
    return tensor


def _as_array(values: Any, name: str, as_features: bool) -> NDArray[Any]:
    if hasattr(values, "columns") and hasattr(values, "items"):
        # Column by column: a data frame of bools and floats as a whole is an array of objects.
        columns = [_numbers(column, f"{name}[{key!r}]") for key, column in values.items()]
        if not columns:
            raise DataError(f"{name} is a data frame without columns")
        table = np.stack(columns, axis=1)
        if as_features and table.dtype.kind in "biu":
            return table.astype(np.float64)
        return table
    return _numbers(values, name)


def _numbers(values: Any, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise DataError(f"{name} cannot be one array: {reason(error)}") from None
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{name} ({type(values).__name__} of {array.dtype}) holds no numbers that an array can "
            "be made of: encode texts and classes as numbers, as sklearn.preprocessing's "
            "OrdinalEncoder does, and turn sparse matrices into arrays by .toarray()"
        )
    return array


def _from_array(array: NDArray[Any], name: str) -> Tensor:
    # torch takes no foreign byte order and no negative strides; `ascontiguousarray` turns a single
    # number into an array of one dimension.
    native = array.dtype.newbyteorder("=")
    contiguous = np.ascontiguousarray(array, dtype=native).reshape(array.shape)
    with warnings.catch_warnings():
        # Batches are copies, so nobody writes to read-only memory, such as a data frame's.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.from_numpy(contiguous)
        except TypeError as error:
            raise DataError(f"{name}: torch has no tensors of {array.dtype}") from error
