"""A data set on the device, from which batches are gathered there."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import least_of, map_leaves, map_tensors, note_least, to_device
from data.loading.device_transforms import sent

logger = logging.getLogger(__name__)


def can_be_kept(kind: type) -> bool:
    """Return whether a data set has `tensors()`, and no subclass another way to a sample."""
    for base in kind.__mro__:
        if "tensors" in vars(base):
            return True
        if "__getitem__" in vars(base) or "batch" in vars(base):
            return False
    return False


class Kept:
    """All samples of a data set on a device: what travels to it are the numbers of samples.

    `dataset.tensors()` returns all samples as one batch, before any transform: tensors with a row
    for each sample; None if they cannot be one.
    most_bytes: a larger data set stays in host memory, with a warning.
    """

    def __init__(self, dataset: Any, device: torch.device, most_bytes: int) -> None:
        self.dataset = dataset
        self.device = device
        self.most_bytes = most_bytes
        self._tried = False
        self._samples: Any = None

    @property
    def ready(self) -> bool:
        """Whether the data set is on the device."""
        return self._samples is not None

    def fill(self) -> None:
        """Copy the data set to the device, once."""
        if self._tried:
            return
        self._tried = True
        samples = self.dataset.tensors()
        if samples is None:
            logger.warning(
                "warning: data.cache=device: %s holds images of several sizes, or that cannot be "
                "decoded: it stays in host memory",
                type(self.dataset).__name__,
            )
        elif (size := bytes_of(samples)) > self.most_bytes:
            logger.warning(
                "warning: data.cache=device: %d samples take %d bytes, more than "
                "data.cache_bytes=%d: they stay in host memory",
                len(self.dataset),
                size,
                self.most_bytes,
            )
        else:
            self._samples = to_device(samples, self.device, non_blocking=False)
            logger.info("data.cache=device: %d bytes on %s", size, self.device)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as a batch on the device, without waiting for it."""
        rows = sent(torch.from_numpy(np.array(indices)), self.device)
        return map_tensors(lambda tensor: _gathered(tensor, rows), self._samples)


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    found = tensor.index_select(0, rows)
    if (least := least_of(tensor)) is not None and found.device.type != "cpu":
        note_least(found, least)  # it is not more than this
    return found


def bytes_of(samples: Any) -> int:
    """Return the bytes of all tensors of a nested batch."""
    sizes: list[int] = []
    map_leaves(lambda leaf: sizes.append(leaf.nbytes if isinstance(leaf, Tensor) else 0), samples)
    return sum(sizes)
